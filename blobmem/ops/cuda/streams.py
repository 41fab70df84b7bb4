"""On how many streams a net's backward pass is faster: measured once, and kept with the plans of convolutions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from blobmem.dtypes import is_half
from blobmem.ops.call import Call
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import Candidate, Choice, Registry
from blobmem.ops.cuda.cudnn import Cudnn

_NAMES = {1: "one stream", 2: "two streams"}


class Key(NamedTuple):
    """What the choice depends on, besides the file that it is in.

    Attributes:
        x: the shape of what the net's first convolution takes, for people.
        calls: the number of calls, likewise.
        digest: of all calls' ops, and the shapes and dtypes of what they use.
        memory: as for Net.
        math: which file it is in, as of a convolution's key.
    """

    x: tuple[int, ...]
    calls: int
    digest: str
    memory: str
    math: str
    deterministic: bool

    @property
    def text(self) -> str:
        """The key in a file of its math."""
        words = ["backward", f"x={','.join(map(str, self.x))}", f"calls={self.calls}", f"digest={self.digest}"]
        return " ".join([*words, f"memory={self.memory}", *["deterministic"] * self.deterministic])

    @property
    def modest(self) -> int:
        """Bytes of workspace that may be taken for little: what a second stream takes is not what decides."""
        return 0


def key_of(calls: Sequence[Call], memory: str, dtype: np.dtype, device: Any) -> Key | None:
    """The key of the calls of a net's layers for backward; None if they are not to be measured.

    That is where there is no convolution among them: a net without does without cuDNN, whose version files are of.
    """
    convolutions = [call for call in calls if call.op == "conv_backward_weights"]
    if not convolutions:
        return None
    operands = [[(each.op_shape, each.blob.dtype.name) for each in call.present()] for call in calls]
    names = [call.op if isinstance(call.op, str) else "host" for call in calls]
    digest = hashlib.sha256(repr(list(zip(names, operands, strict=True))).encode()).hexdigest()[:16]
    math = dtype.name if is_half(dtype) else device.math
    return Key(convolutions[-1].operand(0).op_shape, len(calls), digest, memory, math, device.deterministic)


def find(key: Key, device: Any) -> Choice | None:
    """The choice for a key, whose `number` is that of the streams, if there is one."""
    if device.predicts:
        return algorithms.predict(device.model, key.math, key)
    return _registry(key, device).find(key)


def register(key: Key, device: Any, ms: Mapping[int, float]) -> Choice:
    """The choice between numbers of streams that took so many ms: what another net, thread or process has registered
    meanwhile; else two, if they are faster by what counts (`algorithms.NEARLY`)."""
    candidates = [Candidate(_NAMES[number], number, 0, lambda: None) for number in ms]
    return _registry(key, device).find_or_register(key, candidates, lambda candidate: ms[candidate.number])


def _registry(key: Key, device: Any) -> Registry:
    return algorithms.registry(device.model, device.library("cudnn", Cudnn).version, key.math)
