"""Images to inputs and back, beside the same steps in plain NumPy."""

import numpy as np
import pytest

from blobmem.errors import NetError
from blobmem.io import Transformer, resize_image
from blobmem.io.transformer import image_transformer

IMAGE = np.random.default_rng(0).random((4, 5, 3)).astype(np.float32)
MEAN = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


def transformer(mean=MEAN, shape=(2, 3, 4, 5)):
    result = Transformer({"data": shape})
    result.set_transpose("data", (2, 0, 1))
    result.set_channel_swap("data", (2, 1, 0))
    result.set_raw_scale("data", 255)
    result.set_mean("data", mean)
    result.set_input_scale("data", 0.5)
    return result


def test_the_steps_and_their_order():
    given = IMAGE.copy()
    done = transformer().preprocess("data", given)
    expected = (IMAGE.transpose(2, 0, 1)[::-1] * np.float32(255) - MEAN) * np.float32(0.5)
    assert done.dtype == np.float32
    np.testing.assert_allclose(done, expected, rtol=1e-6)
    np.testing.assert_array_equal(given, IMAGE)


def test_back_again():
    one = transformer()
    image = one.deprocess("data", one.preprocess("data", IMAGE)[None])
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, IMAGE, atol=1e-5)


def test_nothing_set_is_nothing_done():
    plain = Transformer({"data": [1, 3, 4, 5]})
    np.testing.assert_array_equal(plain.preprocess("data", IMAGE.astype(np.float64)), IMAGE)
    np.testing.assert_array_equal(plain.deprocess("data", np.arange(3)), [0.0, 1, 2])


def test_other_sizes_are_resized_first():
    done = transformer(shape=(2, 3, 6, 7), mean=np.zeros(3)).preprocess("data", IMAGE)
    expected = resize_image(IMAGE, (6, 7)).transpose(2, 0, 1)[::-1] * 127.5
    np.testing.assert_allclose(done, expected, rtol=1e-5)


def test_an_order_that_is_not_its_own_inverse():
    one = Transformer({"data": (1, 3, 4, 5)})
    one.set_transpose("data", (2, 0, 1))
    one.set_channel_swap("data", (1, 2, 0))
    np.testing.assert_array_equal(one.deprocess("data", one.preprocess("data", IMAGE)), IMAGE)


def test_one_channel_keeps_its_axis():
    one = image_transformer("data", (1, 1, 4, 5), mean=np.full((4, 5), 0.5))
    back = one.deprocess("data", one.preprocess("data", IMAGE[:, :, :1])[None])
    np.testing.assert_allclose(back, IMAGE[:, :, :1], atol=1e-6)


@pytest.mark.parametrize(
    ("mean", "stored"),
    [
        (np.array([1, 2, 3]), (3, 1, 1)),
        (MEAN, (3, 4, 5)),
        (np.ones((4, 5)), (1, 4, 5)),
        (np.ones((1, 4, 5)), (1, 4, 5)),
        (np.ones((3, 1, 1)), (3, 1, 1)),
        (np.ones((3, 8, 9)), (3, 4, 5)),
    ],
    ids=["channels", "image", "plane", "one-channel", "pixel", "resized"],
)
def test_means(mean, stored):
    one = Transformer({"data": (1, 3, 4, 5)})
    one.set_mean("data", mean)
    assert one.mean["data"].shape == stored


def test_a_mean_of_another_size_is_resized():
    one = Transformer({"data": (1, 3, 2, 2)})
    one.set_mean("data", MEAN)
    np.testing.assert_allclose(
        one.mean["data"], resize_image(MEAN.transpose(1, 2, 0), (2, 2)).transpose(2, 0, 1), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("transpose", (1, 0), "transpose order of 'data': expected the numbers 0 to 2"),
        ("transpose", (1, 0, 1), "transpose order of 'data': expected the numbers 0 to 2"),
        ("channel_swap", (1, 0), "channel swap of 'data': expected 3 channels, got 2"),
        ("mean", np.zeros(4), "mean of 'data': expected 3 channels, got 4"),
        ("mean", np.zeros((2, 4, 5)), "mean of 'data': expected 3 channels, got 2"),
        ("mean", np.zeros((1, 3, 4, 5)), "mean of 'data': expected an array of 1 to 3 axes"),
    ],
    ids=["short", "twice", "swap", "channels", "planes", "axes"],
)
def test_settings_that_do_not_fit(setting, value, said):
    with pytest.raises(NetError, match=said):
        getattr(Transformer({"data": (1, 3, 4, 5)}), f"set_{setting}")("data", value)


def test_names_that_are_no_inputs():
    one = Transformer({"data": (1, 3, 4, 5)})
    for call in (
        lambda: one.preprocess("image", IMAGE),
        lambda: one.deprocess("image", IMAGE),
        lambda: one.set_raw_scale("image", 1),
        lambda: one.set_input_scale("image", 1),
    ):
        with pytest.raises(NetError, match="'image' is not one of the net's inputs: data"):
            call()


def test_what_is_no_image():
    with pytest.raises(NetError, match=r"image for 'data': expected 3 axes, got an array of shape \(4, 5\)"):
        transformer().preprocess("data", IMAGE[:, :, 0])
    with pytest.raises(NetError, match=r"input 'x': expected a shape of items, channels and more, got \(3,\)"):
        Transformer({"x": (3,)}).set_channel_swap("x", (2, 1, 0))
    with pytest.raises(NetError, match="input 'x': expected one of .items, channels, height, width."):
        image_transformer("x", (2, 3))
