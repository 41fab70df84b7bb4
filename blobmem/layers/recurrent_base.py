"""What recurrent layers have in common: bottoms and tops, the state that they carry, operands of their calls."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from blobmem.layers.base import Layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, Operand, accumulate_diff, call, overwrite, overwrite_diff, read, read_diff

log = logging.getLogger("blobmem")


class Recurrent(Layer):
    """A layer over sequences, of bottoms x (T, N, ...), cont (T, N) and, optionally, x_static (N, ...).

    T steps of N streams, which do not know of each other. Before step t, stream n's state is multiplied by cont[t, n]:
    0 where a sequence begins, else 1. Without `expose_hidden` a forward pass begins with the state in which the last
    one ended, as Caffe's do, and gradients end at the first step. With it the states before the first step are further
    bottoms, those after the last further tops, each (1, N, num_output), and gradients go through them, which in Caffe
    they do not.

    Class attributes:
        state_names: of what is handed from step to step.
        gates: functions of x and the state that each unit has.
    """

    bottoms = (2, 5)
    tops = (1, 3)
    propagates = (True, False, True)
    state_names: ClassVar[tuple[str, ...]] = ()
    gates: ClassVar[int] = 1

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.recurrent_param
        self.units, self.exposed = int(options.num_output), options.expose_hidden
        if self.units < 1:
            raise self.error("num_output", "1 or more", self.units)
        self._check_counts(len(bottom), len(top))
        if any(one is other for one in top for other in bottom):
            raise self.error("top", "other blobs than the bottoms, which it still reads after writing tops")
        self.is_static = len(bottom) > 2 + len(self.state_names) * self.exposed
        self.inputs = self._size(bottom[0], 2, "step")
        self.statics = self._size(bottom[2], 1, "stream") if self.is_static else 0
        self.param_names: list[str] = []
        self.add_params()

    def _check_counts(self, bottoms: int, tops: int) -> None:
        names = self.state_names if self.exposed else ()
        given = f"{'with' if self.exposed else 'without'} expose_hidden"
        if bottoms - len(names) not in (2, 3):
            wanted = ", ".join(["x", "cont", "x_static or not", *(f"{name} before" for name in names)])
            raise self.error("bottom", f"{2 + len(names)} or {3 + len(names)} {given} ({wanted})", bottoms)
        if tops != 1 + len(names):
            wanted = ", ".join(["output", *(f"{name} after" for name in names)])
            raise self.error("top", f"{1 + len(names)} {given} ({wanted})", tops)

    def _size(self, blob: Blob, axis: int, of: str) -> int:
        size = blob.count_of(axis) if blob.num_axes >= axis else 0
        if size < 1:
            raise self.error("bottom", f"a value or more for each {of}", blob.describe())
        return size

    def add_params(self) -> None:
        """Create the parameters in Caffe's order."""
        rows = self.gates * self.units
        self.add_named("w_x", (rows, self.inputs))
        self.add_named("b", (rows,))
        if self.is_static:
            self.add_named("w_static", (rows, self.statics))
        self.add_named("w_h", (rows, self.units))

    def add_named(self, name: str, shape: Sequence[int]) -> None:
        """A parameter that the operands below know by its name; a vector is a bias."""
        options = self.param.recurrent_param
        self.add_param(shape, options.weight_filler if len(shape) > 1 else options.bias_filler)
        self.param_names.append(name)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        x, cont = bottom[:2]
        if x.num_axes < 2 or x.count_of(2) != self.inputs or x.shape[0] < 1:
            raise self.error("bottom", f"1 or more steps, streams, and {self.inputs} values", x.describe())
        self.steps, self.streams = x.shape[:2]
        if cont.shape != x.shape[:2]:
            raise self.error("bottom", f"cont of shape {x.shape[:2]}", cont.describe())
        if self.is_static and (bottom[2].shape[:1] != (self.streams,) or bottom[2].count_of(1) != self.statics):
            raise self.error("bottom", f"{self.streams} streams of {self.statics} values", bottom[2].describe())
        self.state_shape = (1, self.streams, self.units)
        for blob in bottom[2 + self.is_static :]:
            if blob.shape != self.state_shape:
                raise self.error("bottom", f"a state of shape {self.state_shape}", blob.describe())
        top[0].reshape(self.steps, self.streams, self.units)
        for blob in top[1:]:
            blob.reshape(self.state_shape)
        if not self.exposed:
            for name in self.state_names:
                self.internal_blob(name, self.state_shape)

    # ---------------------------------------------------------------- operands, None for absent ones

    def inputs_of(self, bottom: Sequence[Blob]) -> list[Operand | None]:
        """x, cont and x_static."""
        static = read(bottom[2], (self.streams, self.statics)) if self.is_static else None
        return [read(bottom[0], (self.steps, self.streams, self.inputs)), read(bottom[1]), static]

    def parameters(self, *names: str) -> list[Operand | None]:
        """Parameters by name."""
        known = dict(zip(self.param_names, self.blobs, strict=True))
        return [read(known[name]) if name in known else None for name in names]

    def parameter_gradients(self, *names: str) -> list[Operand | None]:
        """Gradients to add to, of those parameters that want one."""
        known = zip(self.param_names, self.blobs, self.param_grads, strict=True)
        wanted = {name: blob for name, blob, used in known if used}
        return [accumulate_diff(wanted[name]) if name in wanted else None for name in names]

    def states_before(self, bottom: Sequence[Blob]) -> list[Operand]:
        """The states that the pass begins with."""
        blobs = bottom[2 + self.is_static :] if self.exposed else [self.internal[name] for name in self.state_names]
        return [read(blob, self.state_shape[1:]) for blob in blobs]

    def states_after(self, top: Sequence[Blob]) -> list[Operand]:
        """The states that it ends with; carried ones are in the same place before and after."""
        blobs = top[1:] if self.exposed else [self.internal[name] for name in self.state_names]
        return [overwrite(blob, self.state_shape[1:]) for blob in blobs]

    def kept(self, *purposes: str) -> list[Operand | None]:
        """What forward keeps for backward, if there is one."""
        return [overwrite(self.internal[purpose]) if self.keeps_state else None for purpose in purposes]

    def state_gradients(self, top: Sequence[Blob]) -> list[Operand | None]:
        """Those of the states after the last step that somebody gives."""
        if not self.exposed:
            return [None] * len(self.state_names)
        given = zip(top[1:], self.top_grads[1:], strict=True)
        return [read_diff(blob, self.state_shape[1:]) if used else None for blob, used in given]

    def bottom_gradients(self, bottom: Sequence[Blob], propagate_down: Sequence[bool]) -> list[Operand | None]:
        """Those of x, x_static and the states before the first step that somebody wants."""
        shapes: list[tuple[int, ...]] = [(self.steps, self.streams, self.inputs), bottom[1].shape]
        shapes += [(self.streams, self.statics)] * self.is_static
        shapes += [self.state_shape[1:]] * len(self.state_names) * self.exposed
        known = zip(bottom, shapes, propagate_down, strict=True)
        x, _, *rest = [overwrite_diff(blob, shape) if wanted else None for blob, shape, wanted in known]
        static = rest.pop(0) if self.is_static else None
        return [x, static, *(rest or [None] * len(self.state_names))]

    def unwritten(self, top: Sequence[Blob]) -> Iterable[Call]:
        """Zero for the output's gradient if nobody gives one (only the states are used)."""
        if not self.top_grads[0]:
            yield call("fill", overwrite_diff(top[0]), value=0.0)

    # ---------------------------------------------------------------- the state carried from pass to pass

    def state_dict(self) -> dict[str, Any]:
        """The carried state: its shape, and its values in double precision, as text."""
        if self.exposed:
            return {}
        state: dict[str, Any] = {"shape": list(self.state_shape)}
        for name in self.state_names:
            values = self.internal[name].cpu_data().astype("<f8")
            state[name] = base64.b64encode(values.tobytes()).decode("ascii")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; if that was of another shape from zero, with a warning.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        if self.exposed:
            return
        shape = tuple(state["shape"])
        values = {}
        for name in self.state_names:
            raw = base64.b64decode(state[name], validate=True)
            values[name] = np.frombuffer(raw, "<f8").reshape(shape)
        fits = shape == self.state_shape
        if not fits:
            log.warning("layer '%s': a state of shape %s was carried, now it is %s: it begins with zero",
                        self.name, shape, self.state_shape)  # fmt: skip
        for name, array in values.items():
            self.internal[name].data[...] = array if fits else 0
