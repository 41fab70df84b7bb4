"""Damaged snapshots: whatever is wrong with one of the three files, the solver goes on from all of them or from none."""

import hashlib
import json

import pytest
from mutations import damage_bytes, damage_message, damage_text
from strangers import fuzz, success_or_error

from blobmem.solvers import get_solver

SOLVER = """
base_lr: 0.1 lr_policy: "step" stepsize: 2 gamma: 0.5 momentum: 0.9 max_iter: 9 snapshot_prefix: "{0}/s" {1} net_param {{
  layer {{ name: "d" type: "DummyData" top: "x" top: "t" dummy_data_param {{ shape {{ dim: 2 dim: 3 }}
    data_filler {{ type: "gaussian" }} }} }}
  layer {{ name: "a" type: "InnerProduct" bottom: "x" top: "y" inner_product_param {{ num_output: 3 }} }}
  layer {{ name: "l" type: "EuclideanLoss" bottom: "y" bottom: "t" }} }}
"""
KINDS = {
    "binary": ("", (".caffemodel", ".blobmem.json", ".solverstate")),
    "hdf5": ("snapshot_format: HDF5", (".caffemodel.h5", ".h5.blobmem.json", ".solverstate.h5")),
}


@pytest.fixture(scope="module", params=KINDS)
def snapshot(request, tmp_path_factory):
    """A solver, the folder of a snapshot of it, and the endings of the snapshot's files: model, sidecar, state."""
    option, endings = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    solver = get_solver(SOLVER.format(folder, option), seed=1)
    solver.step(3)
    solver.snapshot()
    return solver, folder.rename(folder.with_name(f"{request.param} moved")), endings


def everything(solver):
    blobs = [*(entry.blob for entry in solver.net.learnable), *solver.updater.state_blobs()]
    counters = solver.iter, solver.updater.rate.current_step, solver.net.state.iteration, solver.net.state.seed
    return [blob.cpu_data().tobytes() for blob in blobs], counters, repr(solver.smoothed_loss)


@fuzz(60)
def test_restored_whole_or_not_at_all(chance, snapshot, tmp_path):
    solver, folder, endings = snapshot
    _, sidecar, state = endings
    files = {ending: (folder / f"s_iter_3{ending}").read_bytes() for ending in endings}
    changed, ending = dict(files), chance.choice(endings)
    if ending == sidecar and chance.random() < 0.8:
        words = ("null", "1.5", "1e999", "NaN", "[[", '{"a": 1}', "-3", "[]")
        changed[ending] = damage_text(files[ending].decode(), chance, words).encode()
    else:
        damage = damage_message if state == ".solverstate" and chance.random() < 0.7 else damage_bytes
        changed[ending] = damage(files[ending], chance)
        said = json.loads(files[sidecar])
        said["sha256"][ending[1:]] = hashlib.sha256(changed[ending]).hexdigest()
        if ending != sidecar:
            changed[sidecar] = chance.choice((json.dumps(said).encode(), None))
    for name, data in changed.items():
        path = tmp_path / f"s_iter_3{name}"
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
    before, restored = everything(solver), False
    with success_or_error():
        solver.restore(tmp_path / f"s_iter_3{state}")
        restored = True
    assert restored or everything(solver) == before
    if solver.iter < 2**30:
        solver.step(1)
