"""The plan of nets over time: which array lies where in the arena, during which calls; as a page, and as a trace."""

from blobmem.timeline.page import write_page
from blobmem.timeline.rows import Copy, Row, Timeline, timelines
from blobmem.timeline.trace import write_trace

__all__ = ["Copy", "Row", "Timeline", "timelines", "write_page", "write_trace"]
