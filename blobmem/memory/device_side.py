"""The device side of a memory: its allocation, and the stream work that may still be using its bytes."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from blobmem.devices.base import Device, Event, Stream


class Flight:
    """Stream work over bytes [start, stop) that may not have finished.

    With an event it is a copy of ours, finished when the event is done. Without one it is a user of the stream: whoever
    asked for an address to use on `stream` may queue work there at any later time too, so only waiting for the whole
    stream ends it, and the memory must be told again after that (its epoch moves).

    `followers` are the streams already ordered behind it, and `keeps` is what must not go before it has finished.
    """

    __slots__ = ("event", "followers", "keeps", "reads_host", "start", "stop", "stream", "writes")

    def __init__(
        self,
        start: int,
        stop: int,
        stream: Stream,
        event: Event | None,
        reads_host: bool,
        writes: bool,
        keeps: object = None,
    ) -> None:
        self.start, self.stop, self.stream, self.event = start, stop, stream, event
        self.reads_host = reads_host
        self.writes = writes  # device bytes
        self.keeps = keeps
        self.followers: list[Stream] = []

    def wait(self) -> None:
        if self.event is None:
            self.stream.synchronize()
        else:
            self.event.synchronize()

    @property
    def finished(self) -> bool:
        return self.event is not None and self.event.done


class Hold:
    """Kept by whoever was handed the address of an allocation."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self) -> None:
        self.memory: object = None


class DeviceSide:
    """An allocation, or none yet (address 0), and its flights. The owning memory holds its lock around every call.

    It outlives the memory by as long as it takes to free the allocation, and so knows nothing of it.
    """

    __slots__ = ("_hold", "address", "capacity", "device", "flights", "owner")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.address = 0
        self.capacity = 0
        self.owner: Any = None  # of bytes that are not ours
        self.flights: list[Flight] = []
        self._hold: weakref.ref[Hold] | None = None

    def grow(self, nbytes: int, label: str) -> bool:
        """Make room for `nbytes`; whether the bytes moved. OutOfDeviceMemory changes nothing."""
        if self.address == 0:
            self.address = self.device.allocate(nbytes, label)
            self.capacity = nbytes
            return False
        if self.owner is not None or not self.device.grows_in_place(self.address, nbytes):
            self.land()
            if (hold := self.held()) is not None or self.owner is not None:
                return self._leave(nbytes, label, hold)
        address = self.device.grow(self.address, self.capacity, nbytes)
        moved = address != self.address
        self.address, self.capacity = address, nbytes
        return moved

    def _leave(self, nbytes: int, label: str, hold: Hold | None) -> bool:
        """Go on in a new allocation, since others use the old one or it is not ours; it goes when they do."""
        address = self.device.allocate(nbytes, label)
        self.device.memcpy_dtod(address, self.address, self.capacity)
        if hold is not None and self.owner is None:
            weakref.finalize(hold, self.device.when_idle, partial(self.device.free, self.address)).atexit = False
        elif self.owner is not None:
            warnings.warn(
                f"memory {label!r} outgrew the {self.capacity} bytes of the device array it was given, and goes on in "
                f"memory of its own: what is written to that array from now on is not seen. Give a larger array",
                UserWarning,
                stacklevel=6,
            )
        self.address, self.capacity, self.owner, self._hold = address, nbytes, None, None
        return True

    def hold(self) -> Hold:
        """What others who use the allocation keep alive, so that it stays where it is."""
        hold = self.held()
        if hold is None:
            hold = Hold()
            self._hold = weakref.ref(hold)
        return hold

    def held(self) -> Hold | None:
        """What somebody else keeps alive, or None."""
        return None if self._hold is None else self._hold()

    def adopt(self, address: int, nbytes: int, owner: Any) -> None:
        """Use bytes of somebody else's, kept alive by `owner`, in place of an allocation of our own."""
        self.close()
        self.address, self.capacity, self.owner = address, nbytes, owner

    def shrink(self, nbytes: int) -> None:
        """Give back all but the first `nbytes`."""
        self.land()
        if nbytes == 0:
            self.close()
        elif self.owner is None:
            self.device.shrink(self.address, self.capacity, nbytes)
            self.capacity = nbytes

    def close(self) -> None:
        """Free the allocation, once nothing uses it."""
        self.land()
        if self.owner is not None:
            self.address, self.capacity, self.owner = 0, 0, None
        elif self.address:
            address, self.address, self.capacity = self.address, 0, 0
            self.device.free(address)

    def land(self) -> bool:
        """Wait for all flights; whether that ended a stream user."""
        return self._end(self.flights)

    def land_copies(self) -> None:
        """Wait for the flights that are copies of ours; stream users stay."""
        self._end(flight for flight in self.flights if flight.event is not None)

    def land_for_host(self, start: int, stop: int, writes: bool, fetches: bool) -> bool:
        """Before the host's bytes are written, or the device's fetched: wait for what is in the way."""
        in_the_way = [
            f
            for f in self.flights
            if f.start < stop and start < f.stop and ((writes and f.reads_host) or (fetches and f.writes))
        ]
        return self._end(in_the_way, start, stop)

    def order(self, start: int, stop: int, writes: bool, stream: Stream | None) -> bool:
        """Before the device's bytes are used on `stream`, let it come after what is in the way; whether that was news.

        None is the caller itself, who waits.
        """
        in_the_way = [
            f
            for f in self.flights
            if f.start < stop and start < f.stop and (writes or f.writes) and f.stream is not stream
        ]
        if stream is None:
            return self._end(in_the_way, start, stop)
        news = False
        for flight in in_the_way:
            if not flight.finished and stream not in flight.followers:
                stream.wait(flight.event or flight.stream.record())
                flight.followers.append(stream)
                news = True
        return news

    def is_settled(self, start: int, stop: int, writes: bool, stream: Stream | None) -> bool:
        """Whether `order` and `use` would find nothing to do; quicker than asking them."""
        known = stream is None
        for flight in self.flights:
            if flight.start < stop and start < flight.stop:
                if flight.stream is not stream:
                    if (writes or flight.writes) and stream not in flight.followers:
                        return False
                elif flight.event is None and flight.writes == writes and not flight.followers:
                    known = known or (flight.start <= start and stop <= flight.stop)
        return known

    def use(self, start: int, stop: int, writes: bool, stream: Stream) -> bool:
        """Remember a stream user; whether that was news."""
        for flight in self.flights:
            if flight.event is None and flight.stream is stream and flight.writes == writes:
                if flight.start <= start and stop <= flight.stop and not flight.followers:
                    return False
                if flight.start <= stop and start <= flight.stop:
                    flight.start, flight.stop = min(start, flight.start), max(stop, flight.stop)
                    flight.followers.clear()  # they came after what this stream did so far, and not after this
                    return True
        self.flights.append(Flight(start, stop, stream, None, False, writes))
        return True

    def _end(self, flights: Iterable[Flight], start: int = 0, stop: int = sys.maxsize) -> bool:
        """Wait for flights, which are then over; a stream user's in [start, stop) alone: another thread may be about to
        queue work on the rest of what it asked for."""
        ended_user = False
        for flight in list(flights):
            flight.wait()
            self.flights.remove(flight)
            if flight.event is None:
                ended_user = True
                for a, b in ((flight.start, min(start, flight.stop)), (max(stop, flight.start), flight.stop)):
                    if a < b:
                        rest = Flight(a, b, flight.stream, None, flight.reads_host, flight.writes)
                        rest.followers = list(flight.followers)
                        self.flights.append(rest)
        return ended_user

    def drop_finished(self) -> None:
        if self.flights:
            self.flights = [flight for flight in self.flights if not flight.finished]
