"""Every recorded case and every type of layer, in both phases: what is captured, on two streams, gives the bits of what
is not, on one.

A layer is here as soon as it has a row in `layer_cases`.
"""

from pathlib import Path

import numpy as np
import pytest
from cuda_devices import EXACT_GPU, needs_compiler
from late_streams import LateCuda
from layer_cases import CASES, MULTI_TOP

from blobmem import TEST, TRAIN, Net, layer_types
from blobmem.net import captured
from blobmem.proto.text import read_net

RECORDED = {path.stem: path for path in sorted((Path(__file__).parents[1] / "data" / "layers").glob("*.npz"))}
RUNS = 4  # one by itself, one captured, one replayed, and one replayed that adds to gradients or is the first to

OTHERS = {
    "DummyData": ([], 'dummy_data_param { shape { dim: 3 dim: 4 } data_filler { type: "gaussian" } }'),
    "LSTMUnit": (["1 3 4", "1 3 16", "1 3"], "", 2),
    "PriorBox": (["1 4 2 3", "1 3 20 60"], "prior_box_param { min_size: 4 }"),
    "DetectionOutput": (["2 24", "2 18", "1 2 24"], "detection_output_param { num_classes: 3 share_location: true "
                        "background_label_id: 0 nms_param { nms_threshold: 0.4 } keep_top_k: 5 }"),
    "Proposal": (["1 18 3 4", "1 36 3 4", "1 3"], "proposal_param { ratio: 0.5 ratio: 1 ratio: 2 scale: 8 scale: 16 "
                 "scale: 32 pre_nms_topn: 40 post_nms_topn: 8 nms_thresh: 0.7 min_size: 2 }"),
    "ROIPooling": (["2 2 5 6", "5 5"], "roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 }"),
}  # fmt: skip
OF_THE_HOST = {"Data", "HDF5Data", "HDF5Output", "ImageData", "MemoryData", "WindowData", "Python"}


def text_of(type_, shapes, options, tops=1):
    """A net of one layer over inputs."""
    inputs = "".join(
        f'layer {{ name: "in{i}" type: "Input" top: "x{i}" input_param {{ shape {{ '
        + " ".join(f"dim: {dim}" for dim in shape.split())
        + " } } }\n"
        for i, shape in enumerate(shapes)
    )
    ends = "".join(f'bottom: "x{i}" ' for i in range(len(shapes))) + "".join(f'top: "y{i}" ' for i in range(tops))
    return f'name: "case" force_backward: true\n{inputs}layer {{ name: "l" type: "{type_}" {ends} {options} }}'


def made():
    """The nets by name: recorded cases, and what has none."""
    texts = {name: str(np.load(path)["prototxt"]) for name, path in RECORDED.items()}
    covered = {layer.type for text in texts.values() for layer in read_net(text).layer}
    rows = {type_: [([shape] * (count[0] if count else 1), options) for shape, options, *count in rows]
            for type_, rows in CASES.items()}  # fmt: skip
    rows |= {type_: [([shape], options, tops) for shape, options, tops in rows] for type_, rows in MULTI_TOP.items()}
    rows |= {type_: [row] for type_, row in OTHERS.items()}
    for type_, own in rows.items():
        if type_ not in covered:
            texts |= {f"{type_}-{i}": text_of(type_, *row) for i, row in enumerate(own)}
    return texts


TEXTS = made()


def test_every_type_of_layer_is_here():
    ours = {name for name, cls in layer_types().items() if cls.__module__.startswith("blobmem.")}
    assert ours - OF_THE_HOST == {layer.type for text in TEXTS.values() for layer in read_net(text).layer} - OF_THE_HOST


def fill(net, name):
    """What was recorded; else values away from kinks."""
    rng = np.random.default_rng(3)
    for blob in (net.blobs[each] for each in net.inputs):
        blob.data[...] = rng.uniform(0.1, 1, blob.shape)
    if name in RECORDED:
        case = np.load(RECORDED[name])
        for key in case.files:
            kind, _, what = key.partition("/")
            if kind == "in":
                net.blobs[what].data[...] = case[key]
            elif kind == "param":
                layer, index = what.rsplit("/", 1)
                net.params[layer][int(index)].data[...] = case[key]


def trace(name, phase, device):
    """The bytes of all arrays after each of some passes, and how many were written to."""
    net = Net(TEXTS[name], phase, device=device, seed=1, backward_streams=2)
    fill(net, name)
    params = [blob for blobs in net.params.values() for blob in blobs]
    found = []
    for run in range(RUNS):
        if run < RUNS - 1:
            net.clear_param_diffs()
        net.run_forward()
        for blob in (net.blobs[each] for each in net.outputs if net.blobs[each].shape):
            blob.diff[...] = run + 1
        net.run_backward()
        blobs = [*net.blobs.values(), *params]
        found.append([blob.cpu_data().tobytes() for blob in blobs] + [blob.cpu_diff().tobytes() for blob in blobs])
    return net, found


@pytest.mark.parametrize("make", [pytest.param(LateCuda, id="emulated", marks=needs_compiler), EXACT_GPU])
@pytest.mark.parametrize("phase", [TRAIN, TEST], ids=["train", "test"])
@pytest.mark.parametrize("name", TEXTS)
def test_captured_is_what_eager_is(name, phase, make, monkeypatch):
    monkeypatch.setattr(captured, "LEAST", 1)
    monkeypatch.setattr(captured, "_RUNS", 1)
    twin = make()
    twin.graphs, twin.streams = False, 1
    net, found = trace(name, phase, make())
    assert found == trace(name, phase, twin)[1]
    for backward, schedule in enumerate(net.compiled()):
        reasons = net.why_eager(bool(backward))
        assert all(not reason or "host" in reason for reason in reasons.values()), reasons
        pieces = [piece for run in schedule._captured.values() for piece in run if isinstance(piece, captured.Captured)]
        assert bool(pieces) == ("" in reasons.values())
        # a constant is made once, and needs no graph; shapes that depend on values are other calls in each pass
        wanted = [] if net._dynamic else [piece for piece in pieces if not all(step.once for step in piece.steps)]
        assert all(piece.graphs for piece in wanted)
