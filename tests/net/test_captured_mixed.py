"""Captured and eager runs, reads and writes, reshapes and steps in any order, on one stream or two: the numbers of a twin
that never captures and has one."""

import threading
from unittest import mock

import hypothesis.strategies as st
import numpy as np
from cuda_devices import needs_compiler
from cuda_emulation import EmulatedCuda
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from late_streams import ORDERS, LateCuda
from net_calls import WAYS, call_net

import blobmem
from blobmem.errors import BlobmemError
from blobmem.net import captured
from blobmem.proto import caffe_pb2
from blobmem.proto.text import read_net

NET = """
name: "mixed"
layer { name: "data" type: "Input" top: "data" top: "label" include { phase: TRAIN }
  input_param { shape { dim: 3 dim: 6 } shape { dim: 3 } } }
layer { name: "data" type: "Input" top: "data" top: "label" include { phase: TEST }
  input_param { shape { dim: 2 dim: 6 } shape { dim: 2 } } }
layer { name: "one" type: "InnerProduct" bottom: "data" top: "one" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "one" top: "one" }
layer { name: "drop" type: "Dropout" bottom: "one" top: "drop" dropout_param { dropout_ratio: 0.4 } }
layer { name: "two" type: "InnerProduct" bottom: "drop" top: "two" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "Eltwise" bottom: "two" bottom: "drop" top: "sum" }
layer { name: "scale" type: "Scale" bottom: "sum" top: "scale" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scale" bottom: "label" top: "loss" }
"""
SEVERAL = st.integers(1, 4)  # what is done several times is captured, and replayed
MANY = st.integers(1, 8)  # steps, of which the later ones ask for no accesses
WHICH = st.integers(0, 1)  # the train net, or the test net


def made(graphs, memory, iter_size, order=None):
    device = LateCuda(order) if order and graphs else EmulatedCuda()
    device.graphs = graphs
    device.streams = 2 if order else 1  # the twin has the same plan, and queues nothing
    param = caffe_pb2.SolverParameter(
        base_lr=0.1, momentum=0.9, lr_policy="inv", gamma=0.1, power=0.5, random_seed=3, iter_size=iter_size,
        test_iter=[2], test_interval=1000, test_initialization=False,
    )  # fmt: skip
    param.net_param.CopyFrom(read_net(NET))
    return blobmem.get_solver(param, device=device, share=True, forward_only_tests=False, memory=memory,
                              backward_streams=2)  # fmt: skip


class Mixed(RuleBasedStateMachine):
    """Everything is done to both solvers, which give the same, or refuse it in the same words."""

    def __init__(self):
        super().__init__()
        self.patch = mock.patch.multiple(captured, LEAST=1, _RUNS=1)
        self.patch.start()

    def teardown(self):
        if hasattr(self, "solvers"):
            self.compare()
        self.patch.stop()

    @initialize(
        memory=st.sampled_from(["keep", "train"]), iter_size=st.integers(1, 2), order=st.sampled_from([None, *ORDERS])
    )
    def make(self, memory, iter_size, order):
        self.solvers = [made(graphs, memory, iter_size, order) for graphs in (True, False)]
        for which in (0, 1):
            self.fill(which, which)

    def both(self, do, times=1):
        for _ in range(times):
            results = []
            for solver in self.solvers:
                try:
                    results.append(do(solver, [solver.net, *solver.test_nets]))
                except BlobmemError as error:
                    results.append(str(error))
            one, other = results
            assert one == other

    def compare(self):
        """All that can be read."""
        for which in (0, 1):
            for name in self.solvers[0].net.blobs:
                self.look(which, name)
        self.both(lambda _, nets: [entry.blob.cpu_data().tobytes() for entry in nets[0].learnable])

    @rule(which=WHICH, seed=st.integers(0, 9))
    def fill(self, which, seed):
        def write(_, nets):
            rng = np.random.default_rng([seed, which])
            data, label = (nets[which].blobs[name] for name in ("data", "label"))
            data.data[...] = rng.normal(size=data.shape)
            label.data[...] = rng.integers(0, 6, label.shape)

        self.both(write)

    @rule(which=WHICH, name=st.sampled_from(["data", "one", "drop", "sum", "scale", "loss"]))
    def look(self, which, name):
        def read(_, nets):
            blob = nets[which].blobs[name]
            return blob.cpu_data().tobytes(), blob.cpu_diff().tobytes()

        self.both(read)

    @rule(which=WHICH, way=st.sampled_from(WAYS), ends=st.tuples(st.integers(0, 7), st.integers(0, 7)),
          blob=st.sampled_from(["one", "drop", "sum"]), value=st.floats(0, 1, width=32), times=SEVERAL)  # fmt: skip
    def call(self, which, way, ends, blob, value, times):
        def act(_, nets):
            names = nets[which].layer_names
            low, high = (names[min(end, len(names) - 1)] for end in sorted(ends))
            return {name: array.tobytes() if hasattr(array, "tobytes") else array
                    for name, array in call_net(nets[which], way, low, high, blob, value).items()}  # fmt: skip

        self.both(act, times)

    @rule(times=MANY)
    def step(self, times):
        self.both(lambda solver, _: (solver.step(1), solver.smoothed_loss)[1], times)

    @rule(which=WHICH, times=SEVERAL, clear=st.booleans())
    def whole_pass(self, which, times, clear):
        def act(_, nets):
            if clear:
                nets[which].clear_param_diffs()
            loss = nets[which].run_forward()
            nets[which].run_backward()
            return loss

        self.both(act, times)

    @rule(which=WHICH)
    def forward_in_a_thread(self, which):
        def act(_, nets):
            def run():
                try:
                    losses.append(nets[which].run_forward())
                except BlobmemError as error:
                    losses.append(str(error))

            losses = []
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return losses

        self.both(act)

    @rule()
    def test(self):
        self.both(lambda solver, _: [result.loss for result in solver.test_all()])

    @rule(which=WHICH, batch=st.sampled_from([1, 2, 3, 4, 3000]))  # for which memories move
    def reshape(self, which, batch):
        def act(_, nets):
            nets[which].blobs["data"].reshape(batch, 6)
            nets[which].blobs["label"].reshape(batch)

        self.both(act)
        self.fill(which, batch)

    @rule(which=WHICH, name=st.sampled_from(["one", "drop", "sum"]))
    def unshare(self, which, name):
        self.both(lambda _, nets: nets[which].blobs[name].unshare_data())

    @rule(diff=st.booleans(), index=st.integers(0, 3), value=st.floats(-1, 1, width=32))
    def write_param(self, diff, index, value):
        def act(_, nets):
            blob = nets[0].learnable[index % len(nets[0].learnable)].blob
            (blob.diff if diff else blob.data).flat[-1] = value

        self.both(act)

    @rule(index=st.integers(0, 3))
    def clear_a_gradient(self, index):
        self.both(lambda _, nets: nets[0].learnable[index % len(nets[0].learnable)].blob.clear_diff())

    @rule(which=WHICH, name=st.sampled_from(["data", "one", "drop", "loss"]))
    def trim(self, which, name):
        self.both(lambda _, nets: nets[which].blobs[name].data_view.memory.trim())


Mixed.TestCase.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestMixed = needs_compiler(Mixed.TestCase)
