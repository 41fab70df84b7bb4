"""Classifier: which pixels of which crops reach the net."""

import numpy as np
import pytest

from blobmem import TEST, Classifier, Net, set_mode_cpu
from blobmem.errors import NetError
from blobmem.io import oversample, resize_image

NET = """
name: "means"
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { pool: AVE global_pooling: true } }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param { num_output: 3 bias_term: false } }
"""
IMAGES = list(np.random.default_rng(0).random((3, 9, 7, 3)).astype(np.float32))


@pytest.fixture
def files(tmp_path):
    set_mode_cpu()
    model, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    model.write_text(NET)
    net = Net(str(model), TEST)
    net.params["ip"][0].data[...] = np.eye(3)
    net.save(weights)
    return str(model), str(weights)


def means(crops):
    """What the net makes of crops (H, W, K)."""
    return np.array(crops).mean(axis=(1, 2))


def test_ten_crops_of_each_image(files):
    classifier = Classifier(*files, image_dims=(6, 8))
    predictions = classifier.predict(IMAGES)
    resized = [resize_image(image, (6, 8)) for image in IMAGES]
    np.testing.assert_allclose(predictions, means(oversample(resized, (4, 4))).reshape(3, 10, 3).mean(1), rtol=1e-5)


def test_the_centre_alone(files):
    classifier = Classifier(*files, image_dims=[7, 8])
    resized = [resize_image(image, (7, 8))[1:5, 2:6] for image in IMAGES]
    np.testing.assert_allclose(classifier.predict(IMAGES, oversample=False), means(resized), rtol=1e-5)


def test_images_are_brought_to_the_input_by_default(files):
    classifier = Classifier(*files)
    assert classifier.image_dims.tolist() == classifier.crop_dims.tolist() == [4, 4]
    np.testing.assert_allclose(
        classifier.predict(IMAGES, False), means([resize_image(image, (4, 4)) for image in IMAGES]), rtol=1e-5
    )


def test_settings_reach_the_transformer(files):
    settings = {"mean": np.array([1, 2, 3]), "input_scale": 0.5, "raw_scale": 255, "channel_swap": (2, 1, 0)}
    predictions = Classifier(*files, **settings).predict(IMAGES, False)
    plain = Classifier(*files).predict(IMAGES, False)
    np.testing.assert_allclose(predictions, (plain[:, ::-1] * 255 - [1, 2, 3]) / 2, rtol=1e-5)


def test_images_that_do_not_fit(files):
    with pytest.raises(NetError, match="images to classify, got none"):
        Classifier(*files).predict([])
    with pytest.raises(NetError, match="input 'data' takes images of 3 channels"):
        Classifier(*files).predict([np.zeros((5, 5, 1))])
    with pytest.raises(NetError, match="image_dims: expected a height and a width from that of the input on, 4 x 4"):
        Classifier(*files, image_dims=(3, 5))


def test_a_net_without_an_input(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text('layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 1 } } }\n')
    with pytest.raises(NetError, match="has no input: expected a net for deployment"):
        Classifier(str(path), None)
