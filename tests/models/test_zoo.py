"""The nets of models/ and of tests/data/nets: shapes and parameters from the files alone, by a reckoning of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from blobmem.proto.text import read_net, read_solver

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
NETS = ROOT / "tests" / "data" / "nets"
Shape = tuple[int, ...]


class Model(NamedTuple):
    """What a model's files must come to; parameters as published (statistics of batch norm are none)."""

    shape: Shape
    train_batch: int
    test_batch: int
    parameters: int  # of the deploy net
    auxiliary: int = 0  # parameters that only the training net has, or both nets of the train/test file
    classes: int = 1000
    test_images: int = 50_000
    label: Shape = ()
    axis: int = 1  # of classes


ZOO = {
    "lenet": Model((1, 28, 28), 64, 100, 431_080, classes=10, test_images=2_000),
    "caffenet": Model((3, 227, 227), 256, 50, 60_965_224),
    "alexnet": Model((3, 227, 227), 256, 50, 60_965_224),
    "googlenet": Model((3, 224, 224), 32, 50, 6_998_552, 6_379_728),
    "vgg16": Model((3, 224, 224), 64, 50, 138_357_544),
    # 25,557,032 is the number usually given; conv1 has a bias in the authors' files, which most ports leave out
    "resnet50": Model((3, 224, 224), 32, 25, 25_557_032 + 64),
    # MXNet's table has 25,595,060: 45,568 statistics of batch norm besides, and 12 values of that of the images
    "resnet50_v2": Model((3, 224, 224), 32, 25, 25_595_060 - 45_568 - 12),
    # the paper's 10.2 million are those of the convolutions and fc10; the rest are scales and offsets behind batch norm
    "resnet1001": Model((3, 32, 32), 64, 50, 10_178_490 + 149_216, classes=10, test_images=10_000),
    "squeezenet": Model((3, 227, 227), 32, 25, 1_235_496),
    "inception_v3": Model((3, 299, 299), 32, 25, 23_834_568, 3_326_696),
    "densenet264": Model((3, 224, 224), 32, 25, 33_337_704),
    "vnet": Model((1, 64, 128, 128), 2, 1, 65_175_314, classes=2, test_images=4, label=(64, 128, 128)),
    # a table of 33278 x 256, 4 gates of 256 units over 256 values and 256 units with one bias, and the scores
    "lstm_lm": Model((40,), 1408, 1408, 33278 * 256 + 4 * 256 * (256 + 256 + 1) + 33278 * (256 + 1),
                     classes=33278, test_images=1408, label=(40,), axis=2),
}  # fmt: skip
PHASES = {"TRAIN": 0, "TEST": 1}


def in_phase(layer: Any, phase: str) -> bool:
    return not layer.include or any(rule.phase == PHASES[phase] for rule in layer.include)


def window(param: Any, name: str, default: int, axes: int) -> Shape:
    """Kernel, stride or pad along each spatial axis, however the layer spells it."""
    if param.HasField(f"{name}_h"):
        return getattr(param, f"{name}_h"), getattr(param, f"{name}_w")
    given = getattr(param, "kernel_size" if name == "kernel" else name)
    values = [given] if isinstance(given, int) and given else list(given or [default])
    return tuple(values * axes if len(values) == 1 else values)


def convolution(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    param, (batch, channels, *sizes) = layer.convolution_param, bottoms[0]
    defaults = (("kernel", 0), ("stride", 1), ("pad", 0))
    kernel, stride, pad = (window(param, name, default, len(sizes)) for name, default in defaults)
    along = list(zip(sizes, kernel, stride, pad, strict=True))
    if layer.type == "Deconvolution":
        out = [s * (size - 1) + k - 2 * p for size, k, s, p in along]
    else:
        out = [(size + 2 * p - k) // s + 1 for size, k, s, p in along]
    assert channels % param.group == 0 and param.num_output % param.group == 0
    weights = param.num_output * (channels // param.group) * math.prod(kernel)
    return (batch, param.num_output, *out), weights + param.bias_term * param.num_output


def pooling(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    param, (batch, channels, *plane) = layer.pooling_param, bottoms[0]
    if param.global_pooling:
        return (batch, channels, 1, 1), 0
    k, s, p = param.kernel_size, param.stride, param.pad
    if param.round_mode:  # FLOOR
        return (batch, channels, *((size + 2 * p - k) // s + 1 for size in plane)), 0
    out = [math.ceil((size + 2 * p - k) / s) + 1 for size in plane]
    if p:
        out = [o - ((o - 1) * s >= size + p) for o, size in zip(out, plane, strict=True)]
    return (batch, channels, *out), 0


def inner_product(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    outputs, axis = layer.inner_product_param.num_output, layer.inner_product_param.axis
    return (*bottoms[0][:axis], outputs), outputs * (math.prod(bottoms[0][axis:]) + 1)


def embed(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    param = layer.embed_param
    return (*bottoms[0], param.num_output), param.num_output * (param.input_dim + param.bias_term)


def lstm(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    units, inputs = layer.recurrent_param.num_output, math.prod(bottoms[0][2:])
    assert bottoms[1] == bottoms[0][:2], "cont has a number for each step and stream"
    return (*bottoms[0][:2], units), 4 * units * (inputs + units + 1)


def tile(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    shape = list(bottoms[0])
    shape[layer.tile_param.axis] *= layer.tile_param.tiles
    return tuple(shape), 0


def concat(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    assert len({(shape[0], *shape[2:]) for shape in bottoms}) == 1, layer.name
    return (bottoms[0][0], sum(shape[1] for shape in bottoms), *bottoms[0][2:]), 0


def eltwise(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    assert len(set(bottoms)) == 1, layer.name
    return bottoms[0], 0


def score(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    """Losses and accuracies: one number from scores and one label for each place that has scores."""
    axis = (layer.accuracy_param if layer.type == "Accuracy" else layer.softmax_param).axis
    places = [size for size in (*bottoms[0][:axis], *bottoms[0][axis + 1 :]) if size > 1]
    assert places == [size for size in bottoms[1] if size > 1], layer.name
    return (), 0


def same(layer: Any, bottoms: list[Shape]) -> tuple[Shape, int]:
    return bottoms[0], 0


RULES: dict[str, Callable[[Any, list[Shape]], tuple[Shape, int]]] = {
    "Convolution": convolution,
    "Deconvolution": convolution,
    "Tile": tile,
    "Embed": embed,
    "LSTM": lstm,
    "PReLU": lambda layer, bottoms: (bottoms[0], bottoms[0][1]),
    "Pooling": pooling,
    "InnerProduct": inner_product,
    "Concat": concat,
    "Eltwise": eltwise,
    "Accuracy": score,
    "SoftmaxWithLoss": score,
    "Flatten": lambda layer, bottoms: ((bottoms[0][0], math.prod(bottoms[0][1:])), 0),
    "Scale": lambda layer, bottoms: (bottoms[0], 2 * bottoms[0][1]),
    **dict.fromkeys(("ReLU", "LRN", "Dropout", "BatchNorm", "Softmax", "TanH", "Power"), same),
}


class Reckoned(NamedTuple):
    blobs: dict[str, Shape]
    readers: dict[tuple[str, int], int]  # (blob, writer that made it) to the number of layers that read it
    parameters: int


def sources(layer: Any, shape: Shape | None, label: Shape) -> list[Shape] | None:
    if layer.type == "HDF5Data":
        assert shape is not None
        batch = layer.hdf5_data_param.batch_size
        return [(batch, *(label if top == "label" else shape)) for top in layer.top]
    if layer.type == "Data":
        assert shape is not None
        batch = layer.data_param.batch_size
        assert layer.transform_param.crop_size in (0, shape[1])
        return [(batch, *shape), (batch,)]
    if layer.type == "Input":
        return [tuple(item.dim) for item in layer.input_param.shape]
    if layer.type == "DummyData":
        return [tuple(item.dim) for item in layer.dummy_data_param.shape]
    return None


def reckon(net: Any, phase: str = "TEST", shape: Shape | None = None, label: Shape = ()) -> Reckoned:
    """Every blob's shape and the number of parameters; data layers give `shape` and `label` for each of a batch."""
    blobs: dict[str, Shape] = {}
    writer: dict[str, int] = {}
    readers: dict[tuple[str, int], int] = {}
    parameters = 0
    names: set[str] = set()
    for index, layer in enumerate(layer for layer in net.layer if in_phase(layer, phase)):
        assert layer.name not in names, f"two layers named {layer.name}"
        names.add(layer.name)
        outs = sources(layer, shape, label)
        if outs is None:
            for bottom in layer.bottom:
                assert bottom in blobs, f"{layer.name} reads {bottom}, which nothing has written"
                key = (bottom, writer[bottom])
                readers[key] = readers.get(key, 0) + 1
            out, count = RULES[layer.type](layer, [blobs[bottom] for bottom in layer.bottom])
            assert all(size > 0 for size in out), f"{layer.name} has an empty output"
            outs, parameters = [out], parameters + count
        for top, out in zip(layer.top, outs, strict=True):
            assert top not in blobs or top in layer.bottom, f"{layer.name} writes {top} again, not in place"
            blobs[top], writer[top] = out, index
    return Reckoned(blobs, readers, parameters)


def zoo_net(name: str, file: str = "train_val") -> Any:
    return read_net(MODELS / name / f"{file}.prototxt")


def stated_shape(name: str) -> Shape:
    """What the line `# input-shape: data=3x227x227` in the head of the file says."""
    head = (MODELS / name / "train_val.prototxt").read_text().split("layer", 1)[0]
    found = re.search(r"^# input-shape: data=(\d+(?:x\d+)*)$", head, re.MULTILINE)
    assert found, f"{name} does not state its input shape"
    return tuple(map(int, found[1].split("x")))


@pytest.mark.parametrize("name", ZOO)
def test_parameters_are_the_published_number(name: str) -> None:
    model = ZOO[name]
    deploy = reckon(zoo_net(name, "deploy"))
    assert deploy.parameters == model.parameters
    assert deploy.blobs["data"][1:] == model.shape
    assert deploy.blobs["prob"][model.axis] == model.classes
    train = reckon(zoo_net(name), "TRAIN", stated_shape(name), model.label)
    assert train.parameters == model.parameters + model.auxiliary


@pytest.mark.parametrize("name", ZOO)
def test_train_and_test_nets_fit_together(name: str) -> None:
    model, net = ZOO[name], zoo_net(name)
    assert stated_shape(name) == model.shape
    train, test = (reckon(net, phase, model.shape, model.label) for phase in ("TRAIN", "TEST"))
    assert train.blobs["data"] == (model.train_batch, *model.shape)
    assert test.blobs["data"] == (model.test_batch, *model.shape)
    for blob in train.blobs.keys() & test.blobs.keys():
        assert train.blobs[blob][1:] == test.blobs[blob][1:], blob


@pytest.mark.parametrize("name", ZOO)
def test_deploy_has_the_layers_of_the_trained_net(name: str) -> None:
    """A snapshot of the trained net must give every layer of the deploy net its parameters."""
    weighted = ("Convolution", "Deconvolution", "InnerProduct", "Scale", "BatchNorm", "PReLU", "Embed", "LSTM")
    trained = {layer.name: layer for layer in zoo_net(name).layer if in_phase(layer, "TRAIN")}
    for layer in zoo_net(name, "deploy").layer:
        if layer.type in weighted:
            other = trained[layer.name]
            assert other.type == layer.type
            assert list(other.bottom) == list(layer.bottom) and list(other.top) == list(layer.top)


@pytest.mark.parametrize("name", ZOO)
def test_every_weight_is_filled(name: str) -> None:
    """Without a filler a layer starts from zeros, and a deep net then never learns."""
    for layer in zoo_net(name).layer:
        params = (layer.convolution_param, layer.inner_product_param, layer.recurrent_param, layer.embed_param)
        for param in params:
            if param.num_output:
                assert param.weight_filler.type in ("xavier", "msra", "gaussian", "uniform"), layer.name


@pytest.mark.parametrize("name", ZOO)
def test_solver_belongs_to_its_model(name: str) -> None:
    solver, folder = read_solver(MODELS / name / "solver.prototxt"), f"models/{name}/"
    assert solver.net == f"{folder}train_val.prototxt"
    assert solver.snapshot_prefix.startswith(folder)
    assert solver.base_lr > 0 and solver.max_iter > 0 and solver.momentum == pytest.approx(0.9)
    assert list(solver.test_iter) == [ZOO[name].test_images // ZOO[name].test_batch]
    assert solver.test_interval > 0
    for layer in zoo_net(name).layer:
        if layer.type in ("Data", "HDF5Data"):
            assert (layer.data_param.source or layer.hdf5_data_param.source).startswith(folder)


@pytest.mark.parametrize("name", ZOO)
def test_readme_gives_paper_input_and_parameters(name: str) -> None:
    text = (MODELS / name / "README.md").read_text()
    assert "https://" in text
    assert "x".join(map(str, ZOO[name].shape)) in text
    assert f"{ZOO[name].parameters:,}" in text


@pytest.mark.parametrize(("name", "depths"), [("resnet1001", [111, 111, 111]), ("resnet50_v2", [3, 4, 6, 3])])
def test_nets_of_2016_activate_before_each_convolution(name: str, depths: list[int]) -> None:
    """conv1, three convolutions a block, a projection beside them in the first of a stage, and sums that nothing
    touches."""
    wrote: dict[str, str] = {"data": "ReLU", "bn_data": "ReLU"}  # blob -> the type of the layer that wrote it last
    shortcuts = []
    convolutions = 0
    for layer in zoo_net(name, "deploy").layer:
        found = [wrote.get(bottom, "") for bottom in layer.bottom]
        if layer.type == "Convolution":
            convolutions += 1
            assert found == ["ReLU"], layer.name
        elif layer.type == "Eltwise":
            assert found[1] == "Convolution", layer.name
            shortcuts.append(found[0])
        if layer.top[0] not in ("data", "bn_data"):
            wrote[layer.top[0]] = layer.type
    assert convolutions == 1 + 3 * sum(depths) + len(depths)
    assert shortcuts == [kind for depth in depths for kind in ("Convolution", *(depth - 1) * ["Eltwise"])]


@pytest.mark.parametrize(("batch", "mebibytes"), [(50, 200.6), (250, 1002.9)])
def test_caffenet_test_blobs(batch: int, mebibytes: float) -> None:
    """What the test net costs when only weights are shared: every blob and every output of a split, in float32."""
    net = zoo_net("caffenet")
    for layer in net.layer:
        if layer.type == "Data":
            layer.data_param.batch_size = batch
    test = reckon(net, "TEST", (3, 227, 227))
    numbers = {blob: math.prod(shape) for blob, shape in test.blobs.items()}
    splits = sum(count * numbers[blob] for (blob, _), count in test.readers.items() if count > 1)
    assert round(4 * (sum(numbers.values()) + splits) / 2**20, 1) == mebibytes


@pytest.mark.parametrize("path", sorted(NETS.glob("*.prototxt")), ids=lambda path: path.stem)
def test_small_nets_are_sound(path: Path) -> None:
    net = read_net(path)
    train, test = reckon(net, "TRAIN"), reckon(net, "TEST")
    assert train.blobs["label"] == (8,) and test.blobs["label"] == (4,)
    assert train.blobs["loss"] == test.blobs["loss"] == ()
