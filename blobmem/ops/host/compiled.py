"""The decorators for compiled kernels, so that how they are compiled and cached is said in one place.

A loop only becomes vector code when its indices are known not to be negative (they would count from an array's end):
hot loops run from 0 over a slice. An array is copied by a loop too: for `to[:] = array` numba compiles the text
of an error about shapes, seconds in every process that compiles such a kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

from blobmem.proto.files import digest_of

_SOURCES = digest_of(sorted(Path(__file__).parent.glob("*.py")))


class _Files(IndexDataCacheFile):
    """A file for each signature, named by all that its code follows from.

    numba numbers the files, and lists them in another one: two processes that compile a function for different dtypes
    at one time may get each other's code.
    """

    def _name_of(self, key: Any) -> str:
        digest = hashlib.sha256(repr((self._version, self._source_stamp, key)).encode()).hexdigest()[:24]
        return self._data_name_pattern.replace("{number:d}", digest)

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._name_of(key), data)

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._name_of(key))
        except FileNotFoundError:
            return None


class _KernelCache(FunctionCache):
    """numba's cache of compiled code, keyed by the contents of all our kernels' sources, and of the files of a function
    and its parts.

    numba by itself looks at the time of the file that a function is in: it would keep running the old code of a helper
    that was inlined from another file, and compile anew what was only copied.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # numba would take another folder in the given one for each where sources are
        folder = os.environ.get("NUMBA_CACHE_DIR") or self._cache_path
        stamp = _SOURCES, digest_of(_files_of(function))
        self._cache_file = _Files(folder, self._impl.filename_base, stamp)


def _files_of(function: Callable[..., Any]) -> list[Path]:
    """The files of a function and of all compiled ones that it calls."""
    found, waiting = dict[Any, Path](), [function]
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = Path(each.__code__.co_filename)
            called = (getattr(each.__globals__.get(name), "py_func", None) for name in each.__code__.co_names)
            waiting += filter(None, called)
    return sorted({*found.values()})


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on its first call, without the interpreter's lock, and keep the code on disk.

    Division follows NumPy (no exception on zero). A product and a sum may become one fused operation; nothing else is
    reordered, so that an element's value does not depend on where in a vector or a thread's range it falls.
    The code lies in `__pycache__` beside the source, or in the user's cache folder where that cannot be written;
    `NUMBA_CACHE_DIR` overrides both. Where nothing can be written, every process compiles anew.
    """
    return _kept(njit(fastmath=_PLAIN, **_ALWAYS)(function))


def borrowing_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `kernel` that makes no arrays, nor do its parts, which are `borrowing` too: none is counted as used once more
    with every call, which costs a third of the time where calls are short, and more where threads share arrays."""
    return _kept(njit(fastmath=_PLAIN, **_ALWAYS, **_BORROWED)(function))


def borrowing_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `part` of a `borrowing_kernel`."""
    return njit(fastmath=_PLAIN, **_ALWAYS, **_NO_WRAPPERS, **_BORROWED)(function)


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `kernel`, for a function that only kernels call: it costs half the compile time and is kept with them."""
    return njit(fastmath=_PLAIN, **_ALWAYS, **_NO_WRAPPERS)(function)


def reducing_part(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `part` whose sums and maxima may be taken in any order, in vectors.

    The order is fixed by the loop's length, so results repeat; use it where a whole reduction is one thread's.
    """
    return njit(fastmath=_REDUCING, **_ALWAYS, **_NO_WRAPPERS)(function)


def _kept(dispatcher: Any) -> Any:
    # numba's own `cache=True` fails on import where there is no place to write to
    with contextlib.suppress(RuntimeError, OSError):
        dispatcher._cache = _KernelCache(dispatcher.py_func)
    return dispatcher


_ALWAYS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}  # nothing calls them from C
_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True}
_BORROWED: dict[str, Any] = {"_nrt": False}
_PLAIN = {"contract"}
_REDUCING = {"contract", "reassoc", "nsz", "nnan"}
