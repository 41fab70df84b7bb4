"""In-place layers that overwrite what the gradient of an earlier layer reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blobmem.memory import Intent, SyncedMemory, View
from blobmem.net.plan.times import COPIES
from blobmem.ops.call import Call

HARMLESS = {("relu_backward", "relu_forward"), ("relu_backward", "dropout_forward")}
"""(Reader, writer): a sign is all that is read, and where the writer changes it no gradient comes back."""


def stale_reads(forward: Iterable[Call], backward: Iterable[Call]) -> Iterator[tuple[Call, str, Call]]:
    """(Call of backward, blob whose data it reads, later layer's call of forward that has replaced them) of a net."""
    written: dict[SyncedMemory, list[tuple[Call, View]]] = {}
    for writer in forward:
        for view in () if writer.op in COPIES else writer.writes:  # what is brought is no layer's
            written.setdefault(view.memory, []).append((writer, view))
    for reader in backward:
        for operand in reader.present():
            if operand.diff or operand.intent is Intent.OVERWRITE or reader.on_host:
                continue  # a function of the host may read less than it says
            view = operand.view
            for writer, other in written.get(view.memory, ()):
                meets = other.offset < view.offset + view.nbytes and view.offset < other.offset + other.nbytes
                if meets and writer.layer > reader.layer and (reader.op, writer.op) not in HARMLESS:
                    yield reader, operand.blob.name, writer
