"""The Python layer: a class of the user's, found by module and name, that computes at once and emits no calls."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from blobmem.caffe_names import install_as_caffe
from blobmem.layers.base import ANY, Context, Layer, register_layer
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, read, read_diff, write, write_diff


@register_layer
class Python(Layer):
    """`python_param { module: "m" layer: "C" param_str: "..." }` runs class C of module m.

    C derives from `blobmem.Layer` (in scripts for Caffe, `caffe.Layer`) and has setup, reshape and forward, each with
    (bottom, top), and backward(top, propagate_down, bottom). It runs on the host, whatever the device. It may give its
    tops other shapes in reshape, which runs before every forward, and in forward.

    Attributes:
        face: the user's object; `Net.layers` has it.
    """

    type = "Python"
    bottoms: ClassVar[tuple[int, int | None]] = (0, None)
    tops: ClassVar[tuple[int, int | None]] = (0, None)
    dynamic = True
    bottom_kinds = (ANY,)

    def __init__(self, param: Any, context: Context) -> None:
        super().__init__(param, context)
        cls = self._find()
        with self._named():
            face = cls(param)
        face.type, face.phase, face.param_str = self.type, self.phase, param.python_param.param_str
        face.context, face.blobs = context, self.blobs
        self.face: Any = face
        self._shaped = False  # for the coming forward

    def _find(self) -> Any:
        options = self.param.python_param
        if not options.module or not options.layer:
            raise self.error("python_param", "a module and a layer, the name of a class in it")
        if "caffe" not in sys.modules:
            install_as_caffe()  # the module was written for it
        try:
            module = importlib.import_module(options.module)
        except ModuleNotFoundError as error:
            if error.name != options.module.split(".")[0] and error.name != options.module:
                raise
            raise self.error(
                "module", "one that Python finds: set PYTHONPATH to its folder", f"'{options.module}'"
            ) from None
        cls = getattr(module, options.layer, None)
        if not (isinstance(cls, type) and issubclass(cls, Layer)):
            found = "nothing of that name" if cls is None else f"{cls!r}"
            raise self.error(
                "layer", f"the name of a class in {options.module} that derives from caffe.Layer (blobmem.Layer)", found
            )
        return cls

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """The user's errors stay as they are, with a note of where they come from."""
        try:
            yield
        except Exception as error:
            options = self.param.python_param
            error.add_note(f"in layer '{self.name}' (Python: {options.layer} of module {options.module})")
            raise

    # ---------------------------------------------------------------- shapes

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._bottom, self._top = bottom, top
        with self._named():
            self.face.setup(bottom, top)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if self._shaped and not bottom:  # it depends on nothing that may have changed since
            return
        with self._named():
            self.face.reshape(bottom, top)

    def resize(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self.reshape(bottom, top)
        self._shaped = True

    def prepare(self, top: Sequence[Blob]) -> None:
        """A source of data says its shapes before anything runs, so that there is memory for them."""
        if not self._bottom and self.context.device.compute:
            self.resize(self._bottom, top)

    # ---------------------------------------------------------------- computing

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        yield call(self._forward, *map(read, (*bottom, *self.blobs)), *map(write, top))

    def _forward(self, *_: Any) -> None:
        self._shaped = False
        with self._named():
            self.face.forward(self._bottom, self._top)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        self._propagate_down = list(propagate_down)
        reads = [*map(read, (*bottom, *top, *self.blobs))]
        reads += [read_diff(blob) for blob, known in zip(top, self.top_grads, strict=True) if known]
        writes = [write_diff(blob) for blob, wanted in zip(bottom, propagate_down, strict=True) if wanted]
        yield call(self._backward, *reads, *writes, *map(write_diff, self.blobs))

    def _backward(self, *_: Any) -> None:
        with self._named():
            self.face.backward(self._top, self._propagate_down, self._bottom)

    def state_dict(self) -> dict[str, Any]:
        return self.face.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.face.load_state_dict(state)
