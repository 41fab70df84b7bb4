"""What a text with a mistake is told."""

from __future__ import annotations

import random

import pytest
from google.protobuf import text_format

from blobmem.proto import caffe_pb2
from blobmem.proto.diagnose import find_problem, position, tokens

LAYER = 'name: "n"\nlayer {{\n  name: "conv1"\n  {}\n}}\n'
UINT32 = "expected a whole number from 0 to 4294967295"

# What stands in line 4, the column (or line, column) of the problem, where it is said to be, and what is said.
CASES = [
    ("convolution_param { kernal_size: 3 }", 23, "conv1', convolution_param", "did you mean 'kernel_size'"),
    ("convolution_param { num_output: -3 }", 35, "conv1', convolution_param", f"num_output is '-3': {UINT32}"),
    ('convolution_param { num_output: "3" }', 35, "conv1', convolution_param", f'num_output is "3": {UINT32}'),
    ("convolution_param { pad: 3.5 }", 28, "conv1', convolution_param", f"pad is '3.5': {UINT32}"),
    ("convolution_param { pad: 4294967296 }", 28, "conv1', convolution_param", UINT32),
    ("convolution_param { axis: 2147483648 }", 29, "conv1'", "from -2147483648 to 2147483647"),
    ("convolution_param { bias_term: yes }", 34, "conv1', convolution_param", "expected true or false"),
    ("convolution_param { weight_filler { std: a } }", 44, "convolution_param.weight_filler", "expected a number"),
    (
        "pooling_param { pool: AVG }",
        25,
        "conv1', pooling_param",
        "MAX, AVE, STOCHASTIC, without quotes; did you mean AVE",
    ),
    (
        'pooling_param { pool: "MAX" }',
        25,
        "conv1', pooling_param",
        "MAX, AVE, STOCHASTIC, without quotes; did you mean MAX",
    ),
    (
        "pooling_param { pool: ZZZZ }",
        25,
        "conv1', pooling_param",
        "expected one of MAX, AVE, STOCHASTIC, without quotes",
    ),
    ("pooling_param { stride: 1 stride: 2 }", 29, "conv1', pooling_param", "'stride' is given twice"),
    ("relu_param { } relu_param { }", 18, "conv1'", "'relu_param' is given twice"),
    ("type: Convolution", 9, "conv1'", 'write type: "Convolution"'),
    ("type: CONVOLUTION", 9, "conv1'", 'write type: "Convolution"'),
    ("kernel_size: 3", 3, "conv1'", "it belongs in 'convolution_param' or 'pooling_param'"),
    ("num_outputs: 3", 3, "conv1'", "did you mean 'num_output' in 'convolution_param' or"),
    ("zzzzzzzzzz: 3", 3, "conv1'", "unknown field 'zzzzzzzzzz' in LayerParameter"),
    ("include { zzzz: 3 }", 13, "conv1', include", "which has phase, min_level, max_level, stage, not_stage"),
    ("convolution_param: 3", 22, "conv1'", "expected '{' after 'convolution_param', which holds fields, found '3'"),
    ("bottom { }", 10, "conv1'", "expected ':' after 'bottom', found '{'"),
    ("bottom: { }", 11, "conv1'", "bottom is a single value and holds no fields: expected a text in quotes"),
    ('top "a"', 7, "conv1'", "expected ':' after 'top'"),
    ("bottom: \u201ca\u201d", 11, "conv1'", "a typographic quote"),
    ('bottom: "a', 11, "conv1'", "a text that does not end on its line"),
    ('bottom: ["a" "b", ]', 21, "conv1'", "expected a text in quotes, found ']'"),
    ("loss_weight: [1 2]", 19, "conv1'", "expected ',' or ']' in loss_weight, found '2'"),
    ("clip_param { min: 1 }", 23, "conv1', clip_param", "'max' is missing"),
    ("convolution_param {", (2, 7), "conv1'", "this bracket is never closed: a '}' is missing"),
    ("layer { }", 3, "conv1'", "is a '}' missing before it?"),
    ("} }", 5, "", "'}' closes nothing that is open"),
    ("include < phase: TEST }", 25, "conv1', include", "'}' closes nothing that is open"),
    ("bottom:", (5, 1), "conv1'", "bottom has no value"),
    (": 3", 3, "conv1'", "expected the name of a field, found ':'"),
]


@pytest.mark.parametrize("line,where,context,what", CASES, ids=[case[0] for case in CASES])
def test_a_mistake_in_a_layer(line: str, where: int | tuple[int, int], context: str, what: str) -> None:
    text = LAYER.format(line)
    problem = find_problem(text, caffe_pb2.NetParameter.DESCRIPTOR)
    assert problem is not None
    assert (problem.line, problem.column) == (where if isinstance(where, tuple) else (4, where))
    assert context in problem.context
    assert what in problem.what
    if context:
        assert str(problem) == f"{problem.context}: {problem.what}"


@pytest.mark.parametrize(
    "text,context,what",
    [
        ('nmae: "x"', "", "did you mean 'name'?"),
        ("base_lr: 1", "", "it is a field of solvers, is this the right file?"),
        ('layers { name: "a" type: "Convolution" }', "layer 'a'", "types in quotes go with `layer {`"),
        ('layers { name: "a" type: CONVOLUTON }', "layer 'a'", "did you mean CONVOLUTION?"),
        ('layers { layer { kernel: 3 name: "v" } }', "layer 'v'", "did you mean 'kernelsize'?"),
        ('layer { name: "x" } layer { bottom: 3 }', "unnamed layer 2", "expected a text in quotes"),
        ('layer { bottom: 3 top: "t" param { name: "w" } name: "late" }', "layer 'late'", "bottom is '3'"),
        ("state { phase: 7 }", "state", "phase is '7': expected one of TRAIN, TEST"),
        ('name: "x', "", "a text that does not end on its line"),
        ("layer {", "unnamed layer 1", "never closed"),
    ],
)
def test_a_mistake_elsewhere(text: str, context: str, what: str) -> None:
    problem = find_problem(text, caffe_pb2.NetParameter.DESCRIPTOR)
    assert problem is not None
    assert problem.context == context
    assert what in problem.what


def test_a_net_given_as_a_solver() -> None:
    problem = find_problem('name: "n"', caffe_pb2.SolverParameter.DESCRIPTOR)
    assert problem is not None and "it is a field of nets, is this the right file?" in problem.what


GOOD = """name: "x" # c
force_backward: true input: "d" input_shape < dim: [1, 2, 3] >
layer { name: "a" 'bc' type: "Pooling" bottom: "d" pooling_param { pool: AVE kernel_size: 3; stride: 0x2, }
  loss_weight: [1, 2.5f] include { phase: TRAIN } }
layer { name: "clip" clip_param { min: -1 max: inf } param { lr_mult: 1e-3 share_mode: 1 } propagate_down: t }
layers: { type: CONVOLUTION blobs_lr: 1; blobs_lr: 2, convolution_param { pad: [] weight_filler { type: "xavier" } }
  blobs { num: -3 data: .5 } }
layers { layer { name: "v0" type: "conv" kernelsize: 11 } }
"""
SPARE = [
    "3.5",
    "-1",
    "4294967296",
    "foo",
    '"s"',
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    ":",
    ",",
    "nan",
    "08",
    '"open',
    "@",
    "-",
]


def test_it_finds_a_problem_exactly_where_protobuf_does() -> None:
    """The second reader must never contradict the first: held together on texts damaged at random."""
    rng = random.Random(0)
    words = [token.text for token in tokens(GOOD)][:-1]
    refused = 0
    for _ in range(400):
        damaged = list(words)
        at = rng.randrange(len(words))
        damaged[at : at + rng.randrange(2)] = [rng.choice(words + SPARE)] * rng.randrange(2)
        text = "\n".join(damaged)
        message = caffe_pb2.NetParameter()
        try:
            text_format.Parse(text, message)
            fine = message.IsInitialized()
        except text_format.ParseError:
            fine = False
        refused += not fine
        assert (find_problem(text, caffe_pb2.NetParameter.DESCRIPTOR) is None) == fine, text
    assert 100 < refused < 400


def test_the_context_of_a_place() -> None:
    text = LAYER.format("pooling_param { pool: AVE }")
    place = find_problem(text, caffe_pb2.NetParameter.DESCRIPTOR, stop=text.index("AVE"))
    assert place is not None
    assert (place.line, place.column, place.context, place.what) == (4, 25, "layer 'conv1', pooling_param", "")


def test_position() -> None:
    assert [position("ab\n\nc", at) for at in (0, 2, 3, 4)] == [(1, 1), (1, 3), (2, 1), (3, 1)]
