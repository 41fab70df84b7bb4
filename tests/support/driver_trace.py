"""Which calls reach the CUDA driver, from us or from any library: CUPTI's callbacks, counted by name.

with driver_calls() as calls:
    solver.step(1)
assert not growing(calls)
"""

import contextlib
import ctypes
import importlib.util
import re
from collections import Counter
from pathlib import Path

_ENTER, _DRIVER_API = 0, 1

# whatever takes or gives back memory, addresses, page locks or code
_GROWING = re.compile(
    r"cuMem(Alloc|Free|Create|Release|Map|Unmap|Address|SetAccess|Host(Alloc|Register|Unregister)|Pool(Create|Destroy))"
    r"|cu(Module|Library)(Load|Unload)|cuLink|cuCtx(Create|Destroy)|cuDevicePrimaryCtx|cuArray|cuStreamCreate"
    r"|cuGraphInstantiate"
)


class _CallbackData(ctypes.Structure):
    """The beginning of CUPTI's record of a call."""

    _fields_ = [("site", ctypes.c_int), ("name", ctypes.c_char_p)]


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData)
)  # user data, domain, number of the function, record


def _library():
    """CUPTI, from wherever it is installed. OSError where it is not."""
    names = ["libcupti.so.13", "libcupti.so"]
    wheels = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in wheels.submodule_search_locations] if wheels else []
    names += [str(path) for folder in folders for path in sorted(folder.glob("*/lib/libcupti.so.1[0-9]"))]
    for root in sorted(Path("/usr/local").glob("cuda*")):
        names += [
            str(path) for path in (*root.glob("lib*/libcupti.so.1[0-9]"), *root.glob("extras/*/lib*/libcupti.so"))
        ]
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError(f"CUPTI is not installed: none of {', '.join(names)} can be loaded")


def growing(calls):
    """Those of the counted calls that take memory, addresses, page locks or code, or give them back."""
    return {name: count for name, count in calls.items() if _GROWING.match(name)}


@contextlib.contextmanager
def driver_calls():
    """A Counter of the driver's functions that are called while the block runs, in any thread.

    OSError without CUPTI; RuntimeError where it refuses, as it does while a profiler or compute-sanitizer is at work.
    """
    cupti = _library()
    calls = Counter()

    @_Callback
    def seen(_user, domain, _number, data):
        if domain == _DRIVER_API and data.contents.site == _ENTER:
            calls[data.contents.name.decode()] += 1

    subscriber = ctypes.c_void_p()

    def call(name, *arguments):
        code = getattr(cupti, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            cupti.cuptiGetResultString(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'?').decode()}")

    call("cuptiSubscribe", ctypes.byref(subscriber), seen, None)
    try:
        call("cuptiEnableDomain", 1, subscriber, _DRIVER_API)
        yield calls
    finally:
        call("cuptiUnsubscribe", subscriber)
