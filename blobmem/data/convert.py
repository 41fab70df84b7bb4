"""What conversions of data sets have in common: what they report, and work done by several threads in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from blobmem.ops.host.parallel import num_threads

Progress = Callable[[int, int], None]
"""Called with the records done, and those in all."""

REPORT = 100
"""Records between two reports of progress."""

_AHEAD = 4  # items in the making for each thread

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Converted(NamedTuple):
    """A database or file that was made: where it is, and how many records and bytes it has."""

    path: Path
    records: int
    nbytes: int

    @classmethod
    def of(cls, path: Path, records: int) -> Converted:
        """What is at `path`, a folder of files or a file."""
        files = path.iterdir() if path.is_dir() else [path]
        return cls(path, records, sum(file.stat().st_size for file in files))


def in_order(function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """`function` of each item, worked out by several threads a few items ahead; an exception comes in its turn."""
    pending: deque[Future[_Out]] = deque()
    with ThreadPoolExecutor(num_threads(), thread_name_prefix="blobmem-convert") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= _AHEAD * num_threads():
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
