"""`import caffe` for scripts written for Caffe: `install_as_caffe` lets every `caffe.X` be `blobmem.X`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OURS = __name__.partition(".")[0]
_COMPILED = "caffe._caffe"
"""pycaffe's compiled half, whose contents are in the package itself here."""


def install_as_caffe() -> None:
    """Let `import caffe`, `import caffe.io`, `from caffe.proto import caffe_pb2` and so on give blobmem's modules.

    They are the same modules, not copies. A second call changes nothing. Raises ImportError if another caffe has been
    imported: what the program has of it would not fit ours.
    """
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] == "caffe" and not _is_ours(module):
            where = getattr(module, "__file__", None) or "somewhere"
            raise ImportError(
                f"another {name} is already imported, from {where}: call blobmem.install_as_caffe() before anything "
                "imports caffe",
                name="caffe",
            )
    sys.modules["caffe"] = importlib.import_module(_OURS)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # first: the others would load the package's files a second time


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, "__name__", "").partition(".")[0] == _OURS


# neither derives from its class in importlib.abc, which takes longer to import than all of this
class _Finder:
    """Finds caffe.X where there is a blobmem.X."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "caffe" or not rest:
            return None
        name = _OURS if fullname == _COMPILED else f"{_OURS}.{rest}"
        if importlib.util.find_spec(name) is None:
            return None
        loader: Any = _Alias(name)
        return ModuleSpec(fullname, loader)


class _Alias:
    """Loads a module under another name: gives the one that there is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put that of the other name here
