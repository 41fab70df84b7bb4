"""Nets of one layer with other numbers, words and dimensions: each is refused, or runs."""

import re
from pathlib import Path

import numpy as np
import pytest
from strangers import fuzz, success_or_error

from blobmem import TRAIN, Net

CASES = {
    path.stem: str(np.load(path)["prototxt"])
    for path in sorted((Path(__file__).parents[1] / "data" / "layers").glob("*.npz"))
}
NUMBERS = [
    "-3",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "5",
    "7",
    "17",
    "65536",
    "2147483647",
    "4294967295",
    "0.5",
    "nan",
    "-inf",
    "1e30",
]
FEW = 2**20  # bytes of all arrays of a net that is run


def community(kind, options="", *shapes):
    """A net of one layer that the original Caffe has not, over inputs of these shapes."""
    dims = [" ".join(f"dim: {length}" for length in shape) for shape in shapes]
    inputs = "".join(
        f'layer {{ name: "in{i}" type: "Input" top: "b{i}" input_param {{ shape {{ {text} }} }} }}\n'
        for i, text in enumerate(dims)
    )
    bottoms = " ".join(f'bottom: "b{i}"' for i in range(len(shapes)))
    return f'{inputs}layer {{ name: "l" type: "{kind}" {bottoms} top: "t" {options} }}'


PLANES = (2, 4, 5, 6)
CASES |= {
    case[0]: community(*case)
    for case in (
        ("Axpy", "", (2, 4), PLANES, PLANES),
        ("ConvolutionDepthwise", "convolution_param { num_output: 4 kernel_size: 3 }", PLANES),
        ("Interp", "interp_param { zoom_factor: 2 shrink_factor: 1 pad_beg: 0 pad_end: 0 }", PLANES),
        ("Normalize", "norm_param { across_spatial: true channel_shared: true eps: 1e-10 }", PLANES),
        ("Permute", "permute_param { order: 0 order: 2 order: 3 order: 1 }", PLANES),
        ("PriorBox", "prior_box_param { min_size: 2 max_size: 4 aspect_ratio: 2 flip: true step: 2 }", PLANES, (2, 3, 9, 9)),
        ("Proposal", "proposal_param { feat_stride: 16 pre_nms_topn: 9 post_nms_topn: 5 }",
         (1, 18, 2, 2), (1, 36, 2, 2), (1, 3)),
        ("DetectionOutput", "detection_output_param { num_classes: 2 keep_top_k: 3 nms_param { top_k: 4 } }",
         (1, 8), (1, 4), (1, 2, 8)),
        ("ROIPooling", "roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 }", PLANES, (3, 5)),
        ("ShuffleChannel", "shuffle_channel_param { group: 2 }", PLANES),
        ("Upsample", "upsample_param { scale: 2 pad_out_h: false pad_out_w: false }", PLANES),
        ("ReLU6", "", PLANES),
    )
}  # fmt: skip


def changed(text, chance):
    """The text with a few of its numbers, truth values and names of blobs replaced."""
    pieces = re.split(r"(\s+)", text)
    names = re.findall(r'"\w+"', text)
    for _ in range(chance.choice((1, 1, 2, 3))):
        places = [at for at, piece in enumerate(pieces) if re.fullmatch(r'-?[\d.]+(e-?\d+)?|true|false|"\w+"', piece)]
        at = chance.choice(places)
        if pieces[at] in ("true", "false"):
            pieces[at] = "true" if pieces[at] == "false" else "false"
        else:
            pieces[at] = chance.choice(names if pieces[at].startswith('"') else NUMBERS)
    return "".join(pieces)


def run(net, fill):
    """Forward and backward, where the net is small."""
    blobs = [*net.blobs.values(), *net.internals.values(), *(blob for blobs in net.params.values() for blob in blobs)]
    if sum(blob.nbytes for blob in blobs) < FEW:
        for name in net.inputs:
            net.blobs[name].data[...] = fill
        net.run_forward()
        net.run_backward()


@pytest.mark.parametrize("case", [name for name in CASES if name[0].isupper()])
def test_as_they_are(case):
    run(Net(CASES[case], TRAIN, seed=1), 0.5)


@fuzz(100)
def test_other_numbers(chance):
    text = changed(chance.choice([*CASES.values()]), chance)
    with success_or_error():
        # not those with millions of parameters, which are made at once: slow, but right
        if not re.search(r"num_output: \d{5}|dim: \d{5}", text):
            run(Net(text, TRAIN, seed=1), 1)


@pytest.mark.parametrize("case", CASES)
def test_dimensions_of_zero(case):
    text = CASES[case]
    for match in re.finditer(r"dim: \d+", text):
        with success_or_error():
            run(Net(text[: match.start()] + "dim: 0" + text[match.end() :], TRAIN, seed=1), 1)


@pytest.mark.parametrize("fill", [np.nan, np.inf, -1, 1e9, 2**31, 0.5], ids=str)
def test_values_out_of_range(fill):
    for text in [*CASES.values()][::9]:
        with success_or_error():
            run(Net(text, TRAIN, seed=1), fill)
