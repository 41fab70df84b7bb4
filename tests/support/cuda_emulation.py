"""A CUDA device without a GPU: our kernels, compiled by g++, run thread by thread on host memory.

It finds wrong indices, wrong sums and missing barriers (a block whose threads do not all come to a barrier is an error),
not races and not the precision of the GPU's own functions. cuBLAS is a NumPy stand-in; there is no cuDNN.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from blobmem import dtypes
from blobmem.devices import Event, SimulatedDevice
from blobmem.devices.cuda import sources
from blobmem.devices.cuda.array import CudaArray
from blobmem.devices.cuda.faults import Faults
from blobmem.ops.cuda import algorithms

HEADER = Path(__file__).with_name("cuda_emulation.h")
AVAILABLE = shutil.which("g++") is not None and os.uname().machine == "x86_64"

_lock = threading.Lock()
_libraries = {}
_stacks = ctypes.c_void_p()  # of the fibers, whose library has the lock
_made = []


def _program(source):
    parts = [HEADER.read_text(), sources.read(source)]
    for name, signature in sources.signatures(source).items():
        fields = " ".join(f"{'Pointer' if word == '*' else word} a{i};" for i, word in enumerate(signature.types))
        arguments = ", ".join(f"a->a{i}" for i in range(len(signature.types)))
        parts.append(
            f"struct A_{name} {{ {fields} }};\n"
            f"static void call_{name}(void *p) {{ A_{name} *a = (A_{name} *)p; {name}({arguments}); }}\n"
            f'extern "C" int launch_{name}(const unsigned *grid, const unsigned *block, void *p, char **stacks) '
            f"{{ return run_grid(call_{name}, p, grid, block, {_cluster(source, name)}, stacks); }}"
        )
    return "\n".join(parts)


def _cluster(source, name):
    """How many blocks run at once."""
    return "RANKS" if re.search(rf"IN_CLUSTERS\s[^;{{]*\b{name}\(", sources.read(source)) else "1"


@functools.cache
def _pointees(source):
    """What each parameter of a kernel points to; "" for what is no pointer."""
    pointer = re.compile(r"\s*(?:const\s+)?(\w+)\s*\*")
    text = re.sub(r"//[^\n]*", "", sources.read(source))
    return {
        match["name"]: [
            found[1] if (found := pointer.match(parameter)) else "" for parameter in match["parameters"].split(",")
        ]
        for match in sources._KERNEL.finditer(text)
    }


def _library(source, dtype):
    key = source, dtype.char
    if key not in _libraries:
        program = _program(source)
        macros = [f"-D{macro}" for macro in sources.DEFINES[dtype.name]]
        # what it lacks the process has: searching the standard libraries takes as long as compiling a small source
        path = _built(f"{source}-{dtype.char}", ".so", program, *macros, "-shared", "-nostdlib", _fibers(), "-lgcc")
        _libraries[key] = ctypes.CDLL(str(path))
    return _libraries[key]


@functools.cache
def _fibers():
    """The object that runs a library's threads: the same for all."""
    return _built("fibers", ".o", HEADER.read_text(), "-DFIBERS", "-c")


def _built(name, suffix, program, *options):
    """What the compiler makes of a program, kept by its contents for later runs and other checkouts."""
    # -Og: kernels take a fourth longer than with -O2, and half the time to compile
    options = ["-std=c++17", "-Og", "-fPIC", "-w", "-mno-red-zone", "-x", "c++", "-", "-x", "none", *map(str, options)]
    digest = hashlib.sha256("\0".join([program, *options]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"blobmem-emulation-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{digest}{suffix}"
    if not path.exists():
        # one lock for each: parallel test runs compile different ones at a time, and none twice
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            _compile(program, options, path)
    return path


def _compile(program, options, path):
    if path.exists():  # made while this process waited
        return
    made = path.with_suffix(f".{os.getpid()}")
    done = subprocess.run(["g++", *options, "-o", str(made)], input=program, text=True, capture_output=True)
    assert done.returncode == 0, f"{path.stem} does not compile: {done.stderr[-3000:]}"
    made.replace(path)


class Arrival(Event):
    """Of a copy that takes until the second one after it, or until it is waited for; its source must not change then."""

    def __init__(self, link, source):
        self.link, self.number = link, link.sent
        self.source, self.copy = source, source.tobytes()

    def check(self):
        assert self.source is None or self.source.tobytes() == self.copy, "a buffer changed while a device read it"
        self.source = None

    @property
    def done(self):
        if self.source is not None and self.link.sent - self.number < 2:
            return False
        self.check()
        return True

    def synchronize(self):
        self.check()


class EmulatedLink:
    """Stands for blobmem.devices.cuda.link.Link; the copies have been made at once, but say that they take time."""

    def __init__(self, device):
        self.device, self.sent, self.under_way = device, 0, []

    def send(self, target, source):
        assert source.flags.c_contiguous and source.nbytes == target.nbytes
        ctypes.memmove(target.address, source.ctypes.data, source.nbytes)
        self.device.statistics.htod_copies += 1
        self.device.statistics.htod_bytes += source.nbytes
        self.sent += 1
        self.under_way = [arrival for arrival in self.under_way if not arrival.done]
        self.under_way.append(Arrival(self, source))
        return self.under_way[-1]

    def used(self, array):
        pass


class EmulatedGraph:
    """Stands for blobmem.devices.cuda.graph.Graph: what was queued while it was made, to be done when it is launched."""

    def __init__(self, device, queue):
        self.device, self.work, self.launched, self.copied = device, [], 0, Counter()
        device.recording = self.work
        try:
            queue(self)
        finally:
            device.recording = None

    def launch(self):
        self.launched += 1
        self.device.statistics.add(self.copied)
        for work in self.work:
            work()

    def copy_out(self, array, address):
        source = self.device.as_array(address, array.shape, np.uint8).address
        self.device.do(lambda: ctypes.memmove(array.ctypes.data, source, array.nbytes))
        self.copied += Counter(dtoh_copies=1, dtoh_bytes=array.nbytes)

    def copy_in(self, array, address):
        target = self.device.as_array(address, array.shape, np.uint8).address
        self.device.do(lambda: ctypes.memmove(target, array.ctypes.data, array.nbytes))
        self.copied += Counter(htod_copies=1, htod_bytes=array.nbytes)

    def varied(self):
        return EmulatedVaried(self)

    def write_dot(self, path):
        Path(path).write_text(f"digraph {{ {' '.join(f'n{at};' for at in range(len(self.work)))} }}")


class EmulatedVaried:
    """Stands for blobmem.devices.cuda.graph.Varied."""

    def __init__(self, graph):
        self._graph, self._places, self._next = graph, [], None
        self._told, self._known = [], {}

    def __getattr__(self, name):
        return getattr(self._graph.device, name)

    def kernel(self, source, name, dtype):
        launch = self._graph.device.kernel(source, name, dtype)

        def queue(*arguments):
            work = self._graph.work
            if self._next is None:
                self._places.append(len(work))
                launch(*arguments)
                return
            self._graph.device.recording = []
            launch(*arguments)
            self._told += self._graph.device.recording
            self._graph.device.recording = None
            work[self._places[self._next]] = self._told[self._next]
            self._next += 1

        return queue

    def again(self, key=None):
        known = self._known.get(key, ())
        if key is None or len(known) < len(self._places):
            self._next, self._told = 0, []
            self._known |= {} if key is None else {key: self._told}
            return True
        for place, work in zip(self._places, known, strict=True):
            self._graph.work[place] = work
        return False


class EmulatedCuda(SimulatedDevice):
    """See the module."""

    name = "emulated"
    family = "cuda"
    math = "fp32"
    deterministic = True
    predicts = False
    graphs = True
    workspace_limit = 64 << 20
    clusters = True

    def __init__(self, capacity=None, **options):
        super().__init__(capacity, **options)
        self.fault_words, self.fault_flag = np.zeros(4, np.int64), np.zeros(1, np.int64)
        self.fault_words[3] = self.fault_flag.ctypes.data
        self.faults = self.make_faults(lambda: None)
        self.launches, self.captured, self._of_thread = [], [], threading.local()
        self._scratch = range(0)
        self._link = EmulatedLink(self)
        _made.append(self)

    def make_faults(self, settle):
        words = self.fault_words
        return Faults(words, words.ctypes.data, settle, lambda: self.fault_flag.fill(0))

    def link(self):
        return self._link

    def pin(self, address, nbytes):
        return True

    def unpin(self, address):
        pass

    def as_array(self, address, shape, dtype):
        array = super().as_array(address, shape, dtype)
        return CudaArray(array.ctypes.data, shape, dtype, self)

    def memcpy_dtoh(self, array, address, stream=None):
        self.faults.check()
        if address in self._scratch:
            ctypes.memmove(array.ctypes.data, address, array.nbytes)
        else:
            super().memcpy_dtoh(array, address, stream)

    def synchronize(self):
        super().synchronize()
        self.faults.check()

    def copy_bytes(self, target, source, nbytes):
        assert target + nbytes <= source or source + nbytes <= target
        self.do(lambda: ctypes.memmove(target, source, nbytes))

    def set_bytes(self, target, value, nbytes):
        self.do(lambda: ctypes.memset(target, value, nbytes))

    @property
    def recording(self):
        """Where this thread puts work down while it makes a graph."""
        return getattr(self._of_thread, "recording", None)

    @recording.setter
    def recording(self, work):
        self._of_thread.recording = work

    def capture(self, queue):
        with self.capturing():
            self.captured.append(EmulatedGraph(self, queue))
        return self.captured[-1]

    def do(self, work):
        """Do some work on the device's memory, or put it down for later while a graph is made."""
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def kernel(self, source, name, dtype):
        signature = sources.signatures(source)[name]
        with _lock:
            run = getattr(_library(source, dtype), f"launch_{name}")
        packer = signature.packer(dtype)
        kinds = {"D": np.dtype(dtype), "T": dtypes.exact(np.dtype(dtype))}
        wanted = [(at, kinds[word]) for at, word in enumerate(_pointees(source)[name]) if word in kinds]

        def launch(grid, block, arguments):
            for at, kind in wanted:
                found = getattr(arguments[at], "dtype", kind)  # an address has none, and scratch is bytes
                assert found in (kind, np.uint8), f"kernel {name} takes {kind}, not {found}, as argument {at}"
            assert all(0 < dim < 65536 for dim in (*grid[1:], 1)) and grid[0] < 2**31, grid
            packed = ctypes.create_string_buffer(packer.pack(*signature.flat(arguments)), packer.size + 64)
            block = block if isinstance(block, tuple) else (block,)
            shape = (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid)))
            threads = (ctypes.c_uint * 3)(*block, *[1] * (3 - len(block)))

            def work():
                self.launches.append(name)
                with _lock:
                    result = run(shape, threads, packed, ctypes.byref(_stacks))
                assert result == 0, f"kernel {name}: " + ["", "threads wait for each other", "too many threads"][result]

            self.do(work)

        return launch

    def library(self, name, make):
        if name == "cublas":
            from cublas_stand_in import CublasStandIn

            return CublasStandIn(self)
        return None

    def alone(self):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def scratch(self, nbytes):
        address = self.allocate(nbytes, "scratch")
        try:
            start = self.as_array(address, (nbytes,), np.uint8).address
            self._scratch = range(start, start + nbytes)
            yield start
        finally:
            self._scratch = range(0)
            self.free(address)


def forget_workspaces():
    """Give back what this thread's workspaces hold: cuBLAS's 8 MiB and more, which would live as long as the thread."""
    while _made:
        vars(_made.pop().of_thread).clear()


def own_registry(tmp_path, monkeypatch, module, model, kind):
    """The file of a GPU for which devices of that kind stand, where a module asks for it; nothing is known at first."""
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path))
    monkeypatch.setattr(algorithms, "SHIPPED", tmp_path / "shipped")
    found, real = algorithms.registry(model, 91900, "fp32"), module._registry

    def asked(*given):
        return found if any(isinstance(each, kind) for each in given) else real(*given)

    monkeypatch.setattr(module, "_registry", asked)
    return found
