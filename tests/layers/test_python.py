"""Python layers: classes of the user's, written as for pycaffe."""

import sys
import textwrap

import numpy as np
import pytest
from cuda_devices import DEVICES

from blobmem import TRAIN, Net, NetError, SGDSolver, SimulatedDevice
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net

MODULE = """
import caffe
import numpy as np


class Times(caffe.Layer):
    def setup(self, bottom, top):
        self.factor = float(self.param_str)
        if self.factor < 0:
            raise ValueError("a factor below 0")

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = self.factor * bottom[0].data

    def backward(self, top, propagate_down, bottom):
        if propagate_down[0]:
            bottom[0].diff[...] = self.factor * top[0].diff


class Bias(caffe.Layer):
    def setup(self, bottom, top):
        self.blobs.add_blob(3)
        self.blobs[0].data[...] = [1, 2, 3]

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data + self.blobs[0].data

    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[...] += top[0].diff.sum(0)
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff


class Source(caffe.Layer):
    def setup(self, bottom, top):
        self.sizes, self.reshapes, self.phases = [1, 3, 2], 0, [self.phase]

    def set_sizes(self, sizes):
        self.sizes = list(sizes)

    def reshape(self, bottom, top):
        self.reshapes += 1
        top[0].reshape(self.sizes[0], 3)

    def forward(self, bottom, top):
        top[0].data[...] = self.sizes[0]
        self.sizes = self.sizes[1:] + self.sizes[:1]


class Rows(caffe.Layer):
    '''As many rows as the first value says: known in forward only.'''

    def setup(self, bottom, top):
        top[0].reshape(1, 3)

    def reshape(self, bottom, top):
        pass

    def forward(self, bottom, top):
        top[0].reshape(int(bottom[0].data[0, 0]), 3)
        top[0].data[...] = 1

    def backward(self, top, propagate_down, bottom):
        pass


class Greedy(Times):
    '''With a constructor as pycaffe calls it, and names of its own for what other layers keep elsewhere.'''

    def __init__(self, message):
        super().__init__(message)
        self.asked = message.python_param.param_str

    def setup(self, bottom, top):
        super().setup(bottom, top)
        self.name, self.param, self.context, self.loss_weight, self.error = "mine", None, 1, 2, 3


class FirstRows(caffe.Layer):
    def setup(self, bottom, top):
        pass

    def reshape(self, bottom, top):
        top[0].reshape(int(bottom[0].data.flat[0]), 3)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data[: len(top[0].data)]


class Broken(caffe.Layer):
    def setup(self, bottom, top):
        pass

    def reshape(self, bottom, top):
        top[0].reshape(1)

    def forward(self, bottom, top):
        raise KeyError("mine")


NotALayer = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] in ("caffe", "their_layers")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "their_layers.py").write_text(MODULE)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("caffe", "their_layers")]:
        sys.modules.pop(name)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def layer(name, bottoms, top, cls, options=""):
    bottoms = " ".join(f'bottom: "{bottom}"' for bottom in bottoms)
    return (
        f'layer {{ name: "{name}" type: "Python" {bottoms} top: "{top}" '
        f'python_param {{ module: "their_layers" layer: "{cls}" {options} }} }}\n'
    )


INPUT = 'layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }\n'
TIMES = layer("times", ["x"], "y", "Times", 'param_str: "2.5"')


def test_forward_and_backward(device):
    net = Net("force_backward: true\n" + INPUT + TIMES, TRAIN, device=device)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(net.forward(x=x)["y"], 2.5 * x)
    assert np.array_equal(net.backward(y=x)["x"], 2.5 * x)
    assert type(net.layers[1]).__name__ == "Times" and net.layers[1].type == "Python"
    assert net.layer_dict["times"].factor == 2.5


def test_a_class_may_use_any_name_and_have_a_constructor(tmp_path):
    text = INPUT.replace("Input", "DummyData").replace("input_param", "dummy_data_param")
    text += 'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "p" inner_product_param { num_output: 3 } }\n'
    text += layer("times", ["p"], "y", "Greedy", 'param_str: "2.5"')
    text += 'layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "x" top: "loss" }'
    param = caffe_pb2.SolverParameter(base_lr=0.5, lr_policy="fixed", display=1, snapshot_prefix=str(tmp_path / "s"))
    param.net_param.CopyFrom(read_net(text))
    solver = SGDSolver(param)
    solver.step(2)
    solver.restore(solver.snapshot())
    found = solver.net.layer_dict["times"]
    assert (found.name, found.asked) == ("mine", "2.5")


def test_the_net_goes_on_on_the_device():
    device = SimulatedDevice()
    text = INPUT + 'layer { name: "p" type: "Power" bottom: "x" top: "p" power_param { scale: 2 } }\n'
    text += layer("times", ["p"], "y", "Times", 'param_str: "2.5"')
    text += 'layer { name: "q" type: "Power" bottom: "y" top: "z" power_param { scale: 2 } }\n'
    net = Net(text, TRAIN, device=device)
    x = np.ones((2, 3), np.float32)
    for _ in range(2):
        assert (net.forward(x=x)["z"] == 10).all()
    before = device.statistics.snapshot()
    net.run_forward()
    moved = device.statistics - before
    assert (moved.dtoh_bytes, moved.htod_bytes) == (24, 24), "what the layer reads, and what it wrote"


def test_a_parameter_is_learned_saved_and_loaded(device, tmp_path):
    text = INPUT.replace("Input", "DummyData").replace(
        "input_param { shape", 'dummy_data_param { data_filler { type: "gaussian" } shape'
    )
    text += layer("bias", ["x"], "y", "Bias")
    text += 'layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "x" top: "loss" }'
    param = caffe_pb2.SolverParameter(base_lr=0.5, lr_policy="fixed")
    param.net_param.CopyFrom(read_net(text))
    solver = SGDSolver(param, device=device)
    assert solver.net.params["bias"][0].data.tolist() == [1, 2, 3]
    solver.step(1)
    np.testing.assert_allclose(solver.net.params["bias"][0].data, [0.5, 1, 1.5], rtol=1e-6)
    solver.net.save(tmp_path / "w.caffemodel")
    again = Net(text, TRAIN, device=device, weights=tmp_path / "w.caffemodel")
    np.testing.assert_array_equal(again.params["bias"][0].data, solver.net.params["bias"][0].data)


def test_a_source_says_its_shape_once_before_each_pass(device):
    text = layer("source", [], "x", "Source") + TIMES
    net = Net(text, TRAIN, device=device)
    assert net.layers[0].phases == [TRAIN]
    first = net.layers[0].reshapes
    for rows in (1, 3, 2, 1):
        net.needs()
        assert net.forward()["y"].shape == (rows, 3)
        assert (net.blobs["y"].cpu_data() == 2.5 * rows).all()
    assert net.layers[0].reshapes - first == 4
    net.layers[0].set_sizes([7])
    assert net.forward()["y"].shape == (7, 3)


def test_a_top_may_get_its_shape_in_forward(device):
    net = Net(
        "force_backward: true\n" + INPUT + layer("rows", ["x"], "r", "Rows") + TIMES.replace('"x"', '"r"'),
        TRAIN,
        device=device,
    )
    for rows in (4, 2, 9):
        assert net.forward(x=np.full((2, 3), rows))["y"].shape == (rows, 3)
        assert (net.blobs["y"].cpu_data() == 2.5).all()
        net.backward(y=np.ones((rows, 3)))
        assert net.blobs["r"].diff.shape == (rows, 3) and (net.blobs["r"].diff == 2.5).all()


def test_the_users_own_errors_come_through_with_a_note():
    with pytest.raises(ValueError, match="a factor below 0") as caught:
        Net(INPUT + TIMES.replace("2.5", "-1"), TRAIN)
    assert type(caught.value) is ValueError
    assert caught.value.__notes__ == ["in layer 'times' (Python: Times of module their_layers)"]
    net = Net(INPUT + layer("b", ["x"], "y", "Broken"), TRAIN)
    with pytest.raises(KeyError, match="mine"):
        net.forward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            'module: "their_layers" layer: "NotALayer"',
            "layer: expected the name of a class in their_layers that derives from caffe.Layer.*got 3",
        ),
        ('module: "their_layers" layer: "Absent"', "got nothing of that name"),
        (
            'module: "no_such_module" layer: "X"',
            "module: expected one that Python finds: set PYTHONPATH.*'no_such_module'",
        ),
        ('layer: "X"', "expected a module and a layer"),
    ],
    ids=["class", "absent", "module", "none"],
)
def test_what_cannot_be_found(options, message):
    with pytest.raises(NetError, match=f"layer 'p' \\(Python\\).*{message}"):
        Net(INPUT + f'layer {{ name: "p" type: "Python" bottom: "x" top: "y" python_param {{ {options} }} }}', TRAIN)


def test_a_module_that_lacks_something_of_its_own_says_what(tmp_path):
    (tmp_path / "needs_more.py").write_text(textwrap.dedent("import not_installed_here\n"))
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        Net(INPUT + TIMES.replace("their_layers", "needs_more"), TRAIN)


def test_the_shape_of_a_pass_that_failed_is_not_that_of_the_next(device):
    net = Net(INPUT + layer("first", ["x"], "y", "FirstRows"), TRAIN, device=device)
    stops = [True]

    def stop(index):
        if net.layer_names[index] == "first" and stops:
            raise RuntimeError(stops.pop())

    net.before_forward(stop)
    with pytest.raises(RuntimeError):
        net.forward(x=np.full((2, 3), 1))
    assert net.forward(x=np.full((2, 3), 2))["y"].shape == (2, 3)
