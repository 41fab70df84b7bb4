"""Nets of one layer or a few: every recorded case, and of each type that has none the rows of `layer_cases`."""

from pathlib import Path

import numpy as np
from layer_cases import CASES, MULTI_TOP

from blobmem.proto.text import read_net

RECORDED = {path.stem: path for path in sorted((Path(__file__).parents[1] / "data" / "layers").glob("*.npz"))}
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
