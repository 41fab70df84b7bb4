"""Devices with two streams for each thread that do queued work as late as they may, or in any order that events allow.

A step that is not ordered after another one whose bytes it uses then finds wrong ones. `order` says who is late: "side"
(the second stream), "main", or a number, which seeds a choice at random each time that something is queued.
"""

import random

from cuda_emulation import EmulatedCuda, EmulatedGraph, EmulatedLink

from blobmem import SimulatedDevice
from blobmem.devices.queues import SimulatedEvent, SimulatedStream, Work
from blobmem.memory import Side
from blobmem.net.steps import Step

ORDERS = ["side", "main", 1]


class Captured:
    """An event of a graph that is being made: the pieces of work that it stands for."""

    def __init__(self, graph, work):
        self.graph, self.work = graph, work


class LateEvent(SimulatedEvent):
    def synchronize(self):
        super().synchronize()
        if self.stream.device.faults is not None:
            self.stream.device.faults.check()


class LateStream(SimulatedStream):
    def __init__(self, device):
        super().__init__(device._lock, device._busy)
        self.device = device

    def record(self):
        graph = self.device.graph
        if graph is not None:
            return Captured(graph, frozenset(graph.ends[self]))
        with self.lock:
            return LateEvent(self, self.finished + self.pending)

    def wait(self, event):
        graph = self.device.graph
        if graph is None:
            super().wait(event)
            return
        assert isinstance(event, Captured) and event.graph is graph, "an event from outside of the graph"
        graph.ends[self] = graph.ends.get(self, frozenset()) | event.work


class LateGraph(EmulatedGraph):
    """Its work is done in an order that its dependencies allow, like that of the streams."""

    def __init__(self, device, queue):
        self.after = []  # of each piece of work, those that it comes after
        main = device.compute_stream()
        self.ends = {main: frozenset()}  # of each stream, what its next piece of work comes after
        device.graph = self
        try:
            super().__init__(device, queue)
        finally:
            device.graph = None
        assert device.compute_stream() is main
        assert self._before(self.ends[main]) == {*range(len(self.work))}, "a stream that was not joined"
        self.sides = [stream is not main for stream in self.streams]

    streams = ()

    def put(self, stream):
        """The last piece of work was queued on that stream."""
        assert stream in self.ends, "a stream that was not drawn into the capture"
        self.after.append(self.ends[stream])
        self.streams = [*self.streams, stream]
        self.ends[stream] = frozenset([len(self.after) - 1])

    def _before(self, work):
        found, rest = set(), [*work]
        while rest:
            at = rest.pop()
            if at not in found:
                found.add(at)
                rest += self.after[at]
        return found

    def launch(self):
        self.launched += 1
        self.device.statistics.add(self.copied)
        work, device = [*self.work], self.device

        def run():
            left = dict(enumerate(self.after))
            done = set()
            while left:
                ready = [at for at, after in left.items() if after <= done]
                at = device.chosen(ready, [self.sides[at] for at in ready])
                work[at]()
                done.add(at)
                del left[at]

        device.do(run)


class _Late:
    streams = 2

    def __init__(self, order="side", **options):
        super().__init__(**options)
        self.order, self.graph, self.queued = order, None, {False: 0, True: 0}
        self._random = random.Random(order)

    def compute_stream(self):
        return self._streams()["now"]

    def side_stream(self):
        return self._streams()["side"]

    def queue_on(self, stream):
        assert stream.device is self
        self._streams()["now"] = stream

    def create_copy_stream(self):
        return LateStream(self)

    def _streams(self):
        own = self.of_thread.__dict__
        if "streams" not in own:
            main = LateStream(self)
            own["streams"] = {"main": main, "side": LateStream(self), "now": main}
        return own["streams"]

    def chosen(self, ready, sides):
        """Which of these runs next; `sides` says which are the second stream's."""
        if isinstance(self.order, int):
            return self._random.choice(ready)
        late = self.order == "side"
        return min(zip(sides, ready, strict=True), key=lambda each: (each[0] is late, each[1]))[1]

    def enqueue(self, work):
        own = self._streams()
        now, main, side = own["now"], own["main"], own["side"]
        self.queued[now is side] += 1
        with self._lock:
            now.queue(Work(work))
            if isinstance(self.order, int):
                stream = self._random.choice([main, side])
                stream.finish(stream.finished + self._random.randint(0, stream.pending))
            elif self.order == "main":
                side.finish()


class LateLink(EmulatedLink):
    """Sends once what was queued before has been done."""

    def send(self, target, source):
        SimulatedDevice.synchronize(self.device)
        return super().send(target, source)


class LateCuda(_Late, EmulatedCuda):
    """An emulated CUDA device like that; what is captured too."""

    def __init__(self, order="side", **options):
        super().__init__(order, **options)
        self.faults = self.make_faults(lambda: SimulatedDevice.synchronize(self))
        self._link = LateLink(self)

    def do(self, work):
        if self.recording is None:
            self.enqueue(work)
        else:
            self.recording.append(work)
            if self.graph is not None and self.recording is self.graph.work:
                self.graph.put(self.compute_stream())

    def capture(self, queue):
        self.captured.append(LateGraph(self, queue))
        return self.captured[-1]


class LateSimulated(_Late, SimulatedDevice):
    """A simulated one, whose ops are queued by `launch_late`."""


_launch = Step.launch


def launch_late(step, arguments=None):
    """In place of `Step.launch`: queue the host's ops where the device is a late one."""
    if not isinstance(step.device, LateSimulated) or step.side is Side.HOST:
        _launch(step, arguments)
        return
    arguments, attributes = [*step.arguments] if arguments is None else arguments, dict(step.attributes)
    step.device.enqueue(lambda: step.fn(*arguments, **attributes))
