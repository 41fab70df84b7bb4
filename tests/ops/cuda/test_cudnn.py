"""Graphs, as far as the frontend checks them without a GPU."""

import pytest

from blobmem import dtypes
from blobmem.ops.cuda.algorithms import WORKSPACE_LIMIT, Key
from blobmem.ops.cuda.cudnn import RELU, barred, build_graph, strides

WINDOWS = {
    "1d": ((2, 3, 11), (4, 3, 3), (2,), (1,), (2,), 1),
    "2d": ((2, 3, 7, 9), (4, 3, 3, 2), (1, 2), (1, 0), (1, 1), 1),
    "groups": ((2, 6, 6, 6), (4, 3, 3, 3), (1, 1), (1, 1), (2, 1), 2),
    "depthwise": ((2, 4, 7, 7), (8, 1, 3, 3), (2, 2), (1, 1), (1, 1), 4),
    "3d": ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1),
}


@pytest.fixture
def cudnn():
    module = pytest.importorskip("cudnn")
    try:
        module.backend_version()
    except RuntimeError as error:
        pytest.skip(f"the frontend finds no cuDNN: {error}")
    return module


def key(window, direction="forward", dtype="float32", layout="NCHW", math="fp32", deterministic=False):
    return Key(direction, *WINDOWS[window], dtype, layout, math, deterministic, WORKSPACE_LIMIT)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize(
    "direction", ["forward", "forward+bias", RELU, "forward+sum", "forward+bias+sum+relu", "data", "weights"]
)
@pytest.mark.parametrize("window", WINDOWS)
def test_the_frontend_accepts_the_graph(cudnn, window, direction, dtype, layout):
    problem = key(window, direction, dtype, layout)
    graph = build_graph(cudnn, problem, fused=direction.startswith("forward+"))
    graph.validate()
    dims = {"x": problem.x, "w": problem.w, "y": problem.y}
    for uid, shape in enumerate(dims.values(), 1):
        attributes = graph.query_tensor_attributes_of_uid(uid)
        full = list(shape) if len(shape) > 3 else [*shape[:2], 1, shape[2]]
        assert attributes.get_dim() == full
        assert attributes.get_stride() == strides(full, layout)
        assert not attributes.get_is_virtual()


@pytest.mark.parametrize("window", WINDOWS)
def test_shapes_are_those_that_the_frontend_works_out(cudnn, window):
    problem = key(window)
    number = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=number, intermediate_data_type=number, compute_data_type=number)
    x, w = ([*s[:2], 1, s[2]] if len(s) == 3 else list(s) for s in (problem.x, problem.w))
    axes = len(x) - 2
    pad, stride, dilation = (
        [absent] * (axes - len(values)) + list(values)
        for values, absent in ((problem.pad, 0), (problem.stride, 1), (problem.dilation, 1))
    )
    y = graph.conv_fprop(
        image=graph.tensor(dim=x, stride=strides(x, "NCHW"), data_type=number),
        weight=graph.tensor(dim=w, stride=strides(w, "NCHW"), data_type=number),
        padding=pad, stride=stride, dilation=dilation,
    )  # fmt: skip
    y.set_output(True).set_data_type(number)
    graph.validate()
    assert [n for n in y.get_dim()[2:] if n] == ([1] * (axes - len(problem.pad)) + list(problem.y[2:]))


def test_notes_exist(cudnn):
    names = barred(key("1d", "weights", deterministic=True))
    assert {"TENSOR_CORE", "NONDETERMINISTIC"} <= set(names)
    assert all(hasattr(cudnn.numerical_note, name) for name in names)


def test_what_is_barred():
    assert barred(key("2d", math="tf32")) == ()
    assert barred(key("2d", math="tf32", deterministic=True)) == ("NONDETERMINISTIC",)
    assert "TENSOR_CORE" in barred(key("2d"))
    assert barred(key("2d", dtype="bfloat16", math="bfloat16")) == ("REDUCED_PRECISION_REDUCTION",)
    assert barred(key("2d", dtype="float64")) == ()  # tensor cores keep double precision


def test_strides():
    assert strides([2, 3, 4, 5], "NCHW") == [60, 20, 5, 1]
    assert strides([2, 3, 4, 5], "NHWC") == [60, 1, 15, 3]
    assert strides([2, 3, 4, 5, 6], "NHWC") == [360, 1, 90, 18, 3]
