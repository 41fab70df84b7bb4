"""Nets: prototxt to graph, graph to schedule, sharing between nets, footprints."""

from blobmem.net.builder import Nets, build_nets
from blobmem.net.net import Net
from blobmem.net.sharing import SharingReport

__all__ = ["Net", "Nets", "SharingReport", "build_nets"]
