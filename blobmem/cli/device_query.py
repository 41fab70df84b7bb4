"""`blobmem device-query`: what a device is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from blobmem.cli import options

if TYPE_CHECKING:
    from blobmem.cli.output import Output
    from blobmem.devices import Device

DESCRIPTION = """\
Shows what a device is: of the cpu its model, cores, memory and pages and the threads that layers use, of a simulated
device its capacity.
"""

EXAMPLE = """\
examples:
  blobmem device-query
  blobmem device-query --device simulated:8GiB

BLOBMEM_NUM_THREADS=N sets the number of threads.
"""


def add(commands: Any) -> None:
    """Declare the command."""
    parser = options.new(commands, "device-query", run, "show what a device is", DESCRIPTION, EXAMPLE)
    options.add_device(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Ask the device and print what it says."""
    facts = {name: value for name, value in facts_of(args.device).items() if value is not None}
    human = "\n".join(f"{_title(name)}: {_text(name, value)}" for name, value in facts.items())
    output.event("device", human, **facts)
    return 0


def facts_of(device: Device) -> dict[str, Any]:
    """What the device says of itself and, where layers compute on the host, the threads that they use."""
    from blobmem.devices import HostDevice, SimulatedDevice
    from blobmem.errors import DeviceError
    from blobmem.ops.host.parallel import num_threads

    facts = device.describe()
    if isinstance(device, HostDevice | SimulatedDevice):
        try:
            facts["threads"] = num_threads()
        except ValueError as error:
            raise DeviceError(str(error)) from None
    return facts


def _title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _text(name: str, value: Any) -> str:
    from blobmem.devices.base import readable_bytes

    return readable_bytes(value) if name.endswith("_bytes") else str(value)
