"""Nets that share memory: never another result, never silently."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_devices import DEVICES
from net_calls import WAYS, call_net

from blobmem import TEST, TRAIN, Blob, Net, SharedBlobError, SimulatedDevice, build_nets
from blobmem.devices import HOST
from blobmem.net import steps

NETS = Path(__file__).parents[1] / "data" / "nets"
MLP = """
name: "mlp"
layer { name: "data" type: "DummyData" top: "data" top: "label" include { phase: TRAIN }
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    shape { dim: 6 dim: 4 } shape { dim: 6 } } }
layer { name: "data" type: "DummyData" top: "data" top: "label" include { phase: TEST }
  dummy_data_param { data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }
    shape { dim: 3 dim: 4 } shape { dim: 3 } } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param()


def pair(device, share=True, text=MLP):
    nets = build_nets(text, share=share, device=device, seed=3)
    return nets.train, nets.tests[0], nets.reports[0]


def test_reports_what_is_shared_and_why_not_the_rest(device):
    train, test, report = pair(device)
    assert {"data", "ip1", "ip2", "loss", "loss/sums"} <= set(report.shared)
    assert test.blobs["ip1"].data_view.memory is train.blobs["ip1"].data_view.memory
    assert "filled once" in report.unshared["label"]
    assert "no blob of that name" in report.unshared["accuracy"]
    assert test.params["ip1"][0].data_view.memory is train.params["ip1"][0].data_view.memory


def test_without_sharing_only_parameters_are_shared(device):
    train, test, report = pair(device, share=False)
    assert test.blobs["ip1"].data_view.memory is not train.blobs["ip1"].data_view.memory
    assert test.params["ip1"][0].data_view.memory is train.params["ip1"][0].data_view.memory
    assert not report.shared


def test_same_results_as_unshared(device):
    shared, test, _ = pair(device)
    alone, test_alone, _ = pair(device, share=False)
    for _ in range(3):
        assert test.run_forward() == test_alone.run_forward()
        assert shared.run_forward() == alone.run_forward()
        shared.clear_param_diffs()
        alone.clear_param_diffs()
        shared.run_backward()
        alone.run_backward()
        for name, blobs in shared.params.items():
            for blob, other in zip(blobs, alone.params[name], strict=True):
                np.testing.assert_array_equal(blob.cpu_diff(), other.cpu_diff())


def test_reading_what_another_net_has_overwritten_is_an_error(device):
    train, test, _ = pair(device)
    train.run_forward()
    test.run_forward()
    with pytest.raises(SharedBlobError, match=r"'ip1' of net 'mlp' \(TRAIN\).*net 'mlp' \(TEST\).*share=False"):
        _ = train.blobs["ip1"].data
    with pytest.raises(SharedBlobError, match="--no-share"):
        train.blobs["ip2"].cpu_data()
    assert test.blobs["ip1"].data.shape == (3, 5)
    with pytest.raises(SharedBlobError, match=r"net 'mlp' \(TRAIN\) would read"):
        train.run_backward()
    with pytest.raises(SharedBlobError, match="forward from its first layer"):
        train.forward(start="ip2")
    train.run_forward()
    train.run_backward()
    assert train.blobs["ip1"].data.shape == (6, 5)


def test_an_array_read_before_still_holds_after_an_error(device):
    train, test, _ = pair(device)
    train.run_forward()
    values = train.blobs["ip2"].cpu_data().copy()
    test.run_forward()
    with pytest.raises(SharedBlobError):
        train.run_backward()
    train.state.iteration -= 1
    train.run_forward()
    np.testing.assert_array_equal(train.blobs["ip2"].cpu_data(), values)


def test_parameter_sharing_alone_never_objects(device):
    train, test, _ = pair(device, share=False)
    train.run_forward()
    test.run_forward()
    train.run_backward()
    test.forward(start="ip2")


DISTINCT = """
name: "distinct"
layer { name: "data" type: "DummyData" top: "data" dummy_data_param {
  data_filler { type: "gaussian" } shape { dim: 2 dim: 3 dim: 4 } } }
layer { name: "a" type: "Power" bottom: "data" top: "a" power_param { scale: 2 } }
layer { name: "flat" type: "Flatten" bottom: "a" top: "flat" include { phase: TRAIN } }
layer { name: "flat" type: "Power" bottom: "a" top: "flat" power_param { shift: 1 } include { phase: TEST } }
layer { name: "quiet" type: "Silence" bottom: "flat" include { phase: TRAIN } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "flat" top: "sum" include { phase: TEST } }
"""


def test_bytes_distinct_in_one_net_stay_distinct(device):
    """In the train net `flat` is `a` in another shape; in the test net they are two arrays."""
    train, test, report = pair(device, text=DISTINCT)
    assert train.blobs["a"].data_view.memory is train.blobs["flat"].data_view.memory
    assert test.blobs["a"].data_view.memory is not test.blobs["flat"].data_view.memory
    assert "distinct from it here" in report.unshared["flat"]
    test.run_forward()
    data = test.blobs["data"].cpu_data()
    np.testing.assert_allclose(test.blobs["sum"].cpu_data(), 4 * data + 1, rtol=1e-6)


def test_a_net_input_is_never_shared(device):
    text = MLP.replace('type: "DummyData" top: "data" top: "label"', 'type: "Input" top: "data" top: "label"')
    fillers = 'data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 }'
    text = text.replace(f"dummy_data_param {{ {fillers}", "input_param {")
    train, test, report = pair(device, text=text)
    assert "net input" in report.unshared["data"]
    train.blobs["data"].data[...] = 1
    test.blobs["data"].data[...] = 2
    train.run_forward()
    test.run_forward()
    assert (train.blobs["data"].data == 1).all()
    assert (test.blobs["data"].data == 2).all()


def test_sharing_by_hand(device):
    train = Net(MLP, TRAIN, device=device, seed=1)
    test = Net(MLP, TEST, device=device, seed=2)
    report = test.share_blobs_with(train)
    assert "ip1" in report.shared
    assert test.params["ip2"][0].data_view.memory is train.params["ip2"][0].data_view.memory
    test.run_forward()
    train.run_forward()
    with pytest.raises(SharedBlobError):
        _ = test.blobs["ip1"].data


def test_nets_on_two_devices_cannot_share():
    with pytest.raises(SharedBlobError, match="different devices"):
        Net(MLP, TEST, device=SimulatedDevice()).share_blobs_with(Net(MLP, TRAIN, device=SimulatedDevice()))


def test_nets_that_share_run_one_at_a_time(device):
    train, test, _ = pair(device)
    expected = {}
    for net in (train, test):
        net.state.iteration = 0
        expected[net] = [net.run_forward() for _ in range(20)]
        net.state.iteration = 0
    results = {train: [], test: []}

    def run(net):
        results[net] += [net.run_forward() for _ in range(20)]

    threads = [threading.Thread(target=run, args=(net,)) for net in (train, test)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


@pytest.mark.parametrize("test_batch", [2, 50])
@pytest.mark.parametrize("first", ["train", "test"])
def test_batches_smaller_and_larger_in_either_order(test_batch, first):
    device = SimulatedDevice()
    nets = build_nets(MLP, device=device, seed=3, train_batch=10, test_batches=[test_batch])
    alone = build_nets(MLP, share=False, device=HOST, seed=3, train_batch=10, test_batches=[test_batch])
    order = [(nets.train, alone.train), (nets.tests[0], alone.tests[0])]
    for shared, unshared in order if first == "train" else order[::-1]:
        assert shared.run_forward() == pytest.approx(unshared.run_forward(), rel=1e-6)
    assert device.statistics.moves == 0


def test_room_for_exactly_the_plan_with_the_small_pass_first():
    """The pull request failed here: a test pass at a small batch, then the first training step at a large one."""
    options = {"seed": 3, "train_batch": 256, "test_batches": [50]}
    device = SimulatedDevice()
    nets = build_nets(MLP, device=device, **options)
    nets.train.run_forward()
    nets.train.run_backward()
    nets.tests[0].run_forward()
    plan = device.statistics.bytes_held

    device = SimulatedDevice(capacity=plan)
    nets = build_nets(MLP, device=device, **options)
    nets.tests[0].run_forward()
    nets.train.run_forward()
    nets.train.run_backward()
    assert device.statistics.bytes_held == device.statistics.peak_bytes == plan


def test_steady_state_makes_no_allocator_call():
    device = SimulatedDevice()
    train, test, _ = pair(device)
    for _ in range(2):
        test.run_forward()
        train.run_forward()
        train.run_backward()
        train.clear_param_diffs()
    before = device.statistics.snapshot()
    test.run_forward()
    train.run_forward()
    train.run_backward()
    change = device.statistics - before
    assert change.allocator_calls == 0
    assert change.htod_copies == 0


def test_nets_that_take_turns_need_not_look_at_their_arrays_anew(monkeypatch):
    train, test, _ = pair(SimulatedDevice())

    def turn():
        train.run_forward()
        train.run_backward()
        test.run_forward()

    for _ in range(2):
        turn()
    resolved = []
    original = steps.Step._resolve
    monkeypatch.setattr(
        steps.Step, "_resolve", lambda step, *args: (resolved.append(step.call.layer_name), original(step, *args))
    )
    turn()
    # the losses are read on the host, and what is shared with the other net's loss
    assert set(resolved) <= {"loss", "accuracy"}
    train.run_forward()
    shared = train.blobs["ip1"]
    shared.data  # noqa: B018
    test.run_forward()
    with pytest.raises(SharedBlobError):
        shared.data  # noqa: B018


def test_two_test_nets_share_what_only_they_have():
    nets = build_nets(MLP, device=SimulatedDevice(), seed=1, test_batches=[3, 4])
    first, second = nets.tests
    assert second.blobs["accuracy"].data_view.memory is first.blobs["accuracy"].data_view.memory
    first.run_forward()
    second.run_forward()
    with pytest.raises(SharedBlobError, match=r"\(TEST\) number 0 was overwritten by .*\(TEST\) number 1"):
        _ = first.blobs["accuracy"].data


def test_sharing_by_hand_after_both_nets_have_run(device):
    train, test = Net(MLP, TRAIN, device=device, seed=1), Net(MLP, TEST, device=device, seed=2)
    test.run_forward()
    train.run_forward()
    train.run_backward()
    test.share_blobs_with(train)
    with pytest.raises(SharedBlobError):  # it is the train net's now
        _ = test.blobs["ip1"].data
    with pytest.raises(SharedBlobError):
        test.forward(start="ip2")
    assert train.blobs["ip1"].data.shape == (6, 5)
    test.run_forward()
    assert test.blobs["ip1"].data.shape == (3, 5)
    with pytest.raises(SharedBlobError):
        train.run_backward()


def test_sharing_by_hand_gives_back_what_the_net_had():
    device = SimulatedDevice()
    train, test = Net(MLP, TRAIN, device=device, seed=1), Net(MLP, TEST, device=device, seed=2)
    for net in (train, test):
        net.run_forward()
    apart = device.statistics.bytes_held
    test.share_blobs_with(train)
    test.run_forward()
    assert device.statistics.bytes_held < apart


def test_copying_from_or_onto_what_another_net_has_overwritten_is_an_error(device):
    train, test, _ = pair(device)
    train.run_forward()
    test.run_forward()
    mine = Blob(6, 5, device=device)
    stale = train.blobs["ip1"]
    for use in (lambda: mine.copy_from(stale), lambda: stale.copy_from(mine), stale.unshare_data):
        with pytest.raises(SharedBlobError):
            use()


def test_what_a_user_writes_belongs_to_the_net_of_the_blob(device):
    train, test, _ = pair(device)
    train.blobs["ip1"].data[...] = 1
    with pytest.raises(SharedBlobError):
        test.forward(start="ip2")
    train.forward(start="ip2")


def test_arrays_that_a_pass_returned_stay_right(device):
    train, test, _ = pair(device)
    outputs = train.forward(blobs=["ip1"])
    before = {name: values.copy() for name, values in outputs.items()}
    test.forward()
    for name, values in outputs.items():
        np.testing.assert_array_equal(values, before[name])


def test_a_pass_that_could_not_return_its_outputs_does_not_run(device):
    train, test, _ = pair(device)
    train.run_forward()
    test.run_forward()
    with pytest.raises(SharedBlobError):
        train.forward(start="data", end="data", blobs=["ip2"])
    assert train.state.iteration == 1
    assert test.blobs["data"].data.shape == (3, 4)


@pytest.mark.parametrize("text", [MLP, DISTINCT], ids=["mlp", "distinct"])
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_gives_the_unshared_results_or_an_error(device, text, seed):
    rng = random.Random(seed)
    options = {"device": device, "seed": seed, "test_batches": [2, 9], "forward_only_tests": False}
    here, apart = (build_nets(text, share=share, **options) for share in (True, False))
    here, apart = [here.train, *here.tests], [apart.train, *apart.tests]
    for _ in range(80):
        which, way, value = rng.randrange(3), rng.choice(WAYS), rng.random()
        names = here[which].layer_names
        low, high = sorted(rng.choices(range(len(names)), k=2))
        blob = rng.choice(list(here[which].blobs))

        chosen = way, names[low], names[high], blob, value
        try:
            results = call_net(here[which], *chosen)
        except SharedBlobError:
            continue
        for name, values in call_net(apart[which], *chosen).items():
            np.testing.assert_array_equal(results[name], values)
        for one, other in zip(here[which].learnable, apart[which].learnable, strict=True):
            np.testing.assert_array_equal(one.blob.cpu_diff(), other.blob.cpu_diff())


def test_a_blob_of_the_users_over_a_nets_memory_notices_stale_bytes(device):
    train, test, _ = pair(device)
    mine = Blob(6, 5, device=device, name="mine")
    mine.share_data(train.blobs["ip1"])
    train.run_forward()
    np.testing.assert_array_equal(mine.cpu_data(), train.blobs["ip1"].cpu_data())
    test.run_forward()
    with pytest.raises(SharedBlobError, match="overwritten by net 'mlp'"):
        mine.cpu_data()
