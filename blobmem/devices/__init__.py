"""Devices: where bytes live and layers compute. `get` makes one from a word, `default` is what `device=None` means."""

from __future__ import annotations

import re
import threading
from typing import Any

from blobmem.devices.base import Device, Event, Statistics, Stream
from blobmem.devices.host import HOST, HostDevice
from blobmem.devices.pages import Pages
from blobmem.devices.simulated import SimulatedDevice
from blobmem.errors import DeviceError

__all__ = [
    "HOST",
    "Device",
    "Event",
    "HostDevice",
    "Pages",
    "SimulatedDevice",
    "Statistics",
    "Stream",
    "default",
    "get",
    "memory_info",
    "parse_bytes",
    "set_default",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "switches",
]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power

_gpus: dict[int, Device] = {}  # by ordinal: those that words stand for
_gpus_lock = threading.Lock()
_default: Device = HOST
_switches = 0
_accelerator: Device | str = "cuda"  # what `set_mode_gpu` stands for


def parse_bytes(text: str | int) -> int:
    """A number of bytes from "8GiB", "1.5 GB", "512KiB", "123456"; ValueError says what is accepted.

    KB, MB, GB, TB, PB are powers of 1000; KiB, MiB, GiB, TiB, PiB powers of 1024; upper and lower case alike.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise ValueError(f"{str(text)!r} is not a number of bytes; write for instance 8GiB, 1.5GB, 512KiB or 123456")
    whole, _, fraction = match[1].partition(".")
    scale = 10 ** len(fraction)
    value, rest = divmod(int(whole + fraction) * unit, scale)
    if rest and unit == 1:
        raise ValueError(f"{str(text)!r} is not a whole number of bytes; write for instance {value} or {match[1]}MiB")
    return value


def get(spec: str | Device, memory: int | None = None, **options: Any) -> Device:
    """The device that `spec` names: "cpu", "cuda", "cuda:1", "simulated", or "simulated:BYTES" as in "simulated:8GiB".

    A Device is returned as it is; each "simulated" is a new device, a GPU without options is always the same one.

    Args:
        memory: most bytes to hold there.
        options: of `CudaDevice`: reserve, math, deterministic, graphs, allocator.

    Raises DeviceError for anything else, and for a GPU that is not there or lacks its packages, saying what to do.
    """
    if isinstance(spec, Device):
        return spec
    kind, colon, rest = str(spec).partition(":")
    options = {name: value for name, value in options.items() if value or (name, value) == ("graphs", False)}
    if options and kind != "cuda":
        raise DeviceError(f"device {spec!r} has no {' and no '.join(options)}: that is for a GPU")
    if kind == "cpu" and not colon:
        if memory is not None:
            raise DeviceError("the cpu's memory cannot be limited; limit that of a device: simulated or cuda")
        return HOST
    if kind == "simulated":
        try:
            capacity = parse_bytes(rest) if colon else None
        except ValueError as error:
            raise DeviceError(f"device {spec!r}: {error}") from None
        capacity = memory if capacity is None else min(capacity, memory or capacity)
        if capacity == 0:
            raise DeviceError(f"device {spec!r}: a device needs at least one byte; write for instance simulated:8GiB")
        return SimulatedDevice(capacity)
    if kind == "cuda" and (not colon or rest.isdecimal()):
        return _gpu(int(rest or 0), memory, options)
    known = "cpu, cuda, cuda:N, simulated or simulated:BYTES (as in simulated:8GiB)"
    raise DeviceError(f"device {spec!r} is not known; use {known}")


def _gpu(ordinal: int, memory: int | None, options: dict[str, Any]) -> Device:
    from blobmem.devices.cuda.device import CudaDevice

    if memory is not None or options:
        return CudaDevice(ordinal, memory, **options)
    with _gpus_lock:
        if ordinal not in _gpus:
            _gpus[ordinal] = CudaDevice(ordinal)
        return _gpus[ordinal]


def memory_info(ordinal: int = 0) -> tuple[int, int]:
    """(free, total) bytes of a GPU's memory, whoever uses it. DeviceError if there is no such GPU."""
    from blobmem.devices.cuda.context import Context

    return Context.of(ordinal).memory_info()


def default() -> Device:
    """The device that `device=None` means; the host until `set_default`."""
    return _default


def set_default(device: Device | str) -> None:
    """Let `device=None` mean this device (or its word) from now on.

    Memories made before keep theirs; nets made without a device of their own follow at their next pass.
    """
    global _default, _switches
    _default = get(device)
    _switches += 1


def switches() -> int:
    """How often the default device was set."""
    return _switches


def set_mode_cpu() -> None:
    """Compute on the host: `set_default("cpu")`, under pycaffe's name."""
    set_default(HOST)


def set_mode_gpu() -> None:
    """Compute on the device of `set_device`, or the first GPU. DeviceError if there is none."""
    global _accelerator
    _accelerator = get(_accelerator)
    set_default(_accelerator)


def set_device(device: int | str | Device) -> None:
    """Which device `set_mode_gpu` stands for, at once in GPU mode: a GPU's number, a word of `get`, or a device."""
    global _accelerator
    gpu_mode = _default is _accelerator
    _accelerator = f"cuda:{device}" if isinstance(device, int) else get(device)
    if gpu_mode:
        set_mode_gpu()
