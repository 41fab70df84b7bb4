"""Work of one stream, captured as a CUDA graph: queued again by one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blobmem.devices.cuda.calls import bindings, check, failure

if TYPE_CHECKING:
    from blobmem.devices.cuda.context import Launcher
    from blobmem.devices.cuda.device import CudaDevice


FEW = 1 << 10
"""So many bytes at the most are zeroed by a kernel, where a node that sets memory was captured."""

_WORD = np.dtype(np.float32)


class Graph:
    """What `queue` queues on this thread's compute stream, captured and not run.

    It keeps addresses: whatever memory it uses has to be where it was when it is launched. DeviceError if something
    that was queued cannot be captured; nothing has then been run.
    """

    def __init__(self, device: CudaDevice, queue: Callable[[Graph], None]) -> None:
        self._device = device
        self._copied: Counter[str] = Counter()  # of the device's statistics, what each launch adds
        driver, stream = bindings(), device.compute_stream().native
        # relaxed: threads that read data lock pages and copy meanwhile
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        try:
            queue(self)
        except BaseException:
            driver.cuStreamEndCapture(stream)  # it may have been ended by what failed
            raise
        self._graph = check(driver.cuStreamEndCapture(stream), "cuStreamEndCapture")
        _zero_by_kernels(device, self._graph)
        self._native = check(driver.cuGraphInstantiate(self._graph, 0), "cuGraphInstantiate")

    def launch(self) -> None:
        """Queue it on this thread's compute stream."""
        code = bindings().cuGraphLaunch(self._native, self._device.compute_stream().native)[0]
        if code:
            raise failure(code, "launching a graph")
        if self._copied:
            self._device.statistics.add(self._copied)

    # While it is captured

    def copy_out(self, array: np.ndarray, address: int) -> None:
        """Queue on this thread's compute stream a copy of the device's bytes to page-locked ones of the host."""
        stream = self._device.compute_stream().native
        check(bindings().cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, stream), "cuMemcpyDtoHAsync")
        self._copied += Counter(dtoh_copies=1, dtoh_bytes=array.nbytes)

    def copy_in(self, array: np.ndarray, address: int) -> None:
        """Queue a copy the other way."""
        stream = self._device.compute_stream().native
        check(bindings().cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, stream), "cuMemcpyHtoDAsync")
        self._copied += Counter(htod_copies=1, htod_bytes=array.nbytes)

    def varied(self) -> Varied:
        """Stands for the device to work whose numbers will be others at later launches."""
        return Varied(self, self._device)

    def last_node(self) -> Any:
        """What was captured last."""
        found = check(bindings().cuStreamGetCaptureInfo(self._device.compute_stream().native), "cuStreamGetCaptureInfo")
        return found[3][-1]

    def set_node(self, node: Any, parameters: Any) -> None:
        """Let a kernel have other arguments, from the next launch on."""
        code = bindings().cuGraphExecKernelNodeSetParams(self._native, node, parameters)[0]
        if code:
            raise failure(code, "changing a kernel of a graph")

    def write_dot(self, path: str) -> None:
        """Write it as a DOT file."""
        flags = bindings().CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_KERNEL_NODE_PARAMS
        check(bindings().cuGraphDebugDotPrint(self._graph, path.encode(), flags), "cuGraphDebugDotPrint")

    def __del__(self) -> None:
        if not hasattr(self, "_native"):
            return
        device, natives = self._device, (self._native, self._graph)

        def destroy() -> None:  # what is still running ends first
            device.context.bind()
            bindings().cuGraphExecDestroy(natives[0])
            bindings().cuGraphDestroy(natives[1])

        device.when_idle(destroy)


def _zero_by_kernels(device: CudaDevice, graph: Any) -> None:
    """Have kernels zero what is small, as cuDNN does 4 bytes before many of its own: where a graph has several streams
    a node that sets memory takes up 9 us between two kernels, and a kernel 2."""
    driver = bindings()
    sets = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    for node in _listed("cuGraphGetNodes", graph):
        if _asked("cuGraphNodeGetType", node) != sets:
            continue
        found = _asked("cuGraphMemsetNodeGetParams", node)
        address, count = int(found.dst), found.width * found.elementSize
        if found.value or found.height != 1 or count > FEW or (address | count) % _WORD.itemsize:
            continue
        launcher = device.kernel("neuron", "fill", _WORD)
        launcher.pack((address, count // _WORD.itemsize, 0.0))
        before, after = _listed("cuGraphNodeGetDependencies", node), _listed("cuGraphNodeGetDependentNodes", node)
        made = _asked("cuGraphAddKernelNode", graph, before, len(before), launcher.parameters((1,), 32))
        if after:
            _asked("cuGraphAddDependencies", graph, [made] * len(after), after, None, len(after))
        _asked("cuGraphDestroyNode", node)


def _asked(name: str, *arguments: Any) -> Any:
    return check(getattr(bindings(), name)(*arguments), name)


def _listed(name: str, of: Any) -> Sequence[Any]:
    """What the driver lists, where it says first how much that is."""
    count = _asked(name, of)[-1]
    return _asked(name, of, count)[0] if count else ()


class Varied:
    """A device to the ops of one step of a graph: captures their kernels, then changes these kernels' arguments.

    The step queues the same kernels each time, of as many blocks.
    """

    def __init__(self, graph: Graph, device: CudaDevice) -> None:
        self._graph, self._device = graph, device
        self._nodes: list[tuple[Launcher, Any, Any]] = []  # each with its parameters, but for the arguments
        self._next: int | None = None  # while it is captured
        self._told: list[bytes] = []  # the arguments of each node, since `again`
        self._known: dict[Hashable, list[bytes]] = {}  # those by the key of `again`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def kernel(self, source: str, name: str, dtype: np.dtype) -> Callable[..., None]:
        """As CudaDevice's."""
        if self._next is not None:
            return self._change
        launcher = self._device.kernel(source, name, dtype)

        def launch(grid: tuple[int, ...], block: int | tuple[int, ...], arguments: Sequence[Any]) -> None:
            launcher(grid, block, arguments)
            self._nodes.append((launcher, self._graph.last_node(), launcher.parameters(grid, block)))

        return launch

    def _change(self, grid: tuple[int, ...], block: int | tuple[int, ...], arguments: Sequence[Any]) -> None:
        assert self._next is not None
        launcher, node, parameters = self._nodes[self._next]
        self._told.append(launcher.pack(arguments))
        self._graph.set_node(node, parameters)
        self._next += 1

    def again(self, key: Hashable = None) -> bool:
        """Change what was captured: to what is queued from now on, from the first kernel on, if this is true.

        Else that is done: a key stands for the same arguments each time, and these were told before.
        """
        known = self._known.get(key, ())
        if key is None or len(known) < len(self._nodes):
            self._next, self._told = 0, []
            if key is not None:
                self._known[key] = self._told
            return True
        for (launcher, node, parameters), packed in zip(self._nodes, known, strict=True):
            launcher.put(packed)
            self._graph.set_node(node, parameters)
        return False
