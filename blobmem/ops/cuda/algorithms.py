"""What is fastest on a GPU, a plan for a convolution above all: timed once, then the same for every net, thread,
process and day.

There is a file per GPU model, cuDNN version and math (of halves, their dtype): those that come with the package, and
the user's own, which new choices go to. Footprints without a GPU are predicted from the same files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from blobmem import dtypes
from blobmem.devices.cuda.compiler import cache_folder, keep
from blobmem.errors import DeviceError

_fcntl: Any
try:
    import fcntl as _fcntl
except ImportError:  # Windows: processes that search at one time may each time a plan, the first one written stays
    _fcntl = None

SHIPPED = Path(__file__).parent / "algorithms"

WORKSPACE_LIMIT = 1536 << 20
"""Bytes of workspace that a plan may take unless the device says otherwise. One workspace serves a whole net, so what
is beyond a third of it (`Key.modest`) has to be worth it. With half of that CaffeNet's float32 convolutions are a third
slower, and without what is beyond VGG-16's are behind PyTorch's by a fifth."""

NEARLY = 1.03  # times the fastest plan's time is as good: less workspace decides, and timing noise does not
WORTH = 1.5  # times as fast as all modest plans is one that may take more

ALIGNMENT = 16  # bytes, of arrays that cuDNN's plans are told nothing about

DIRECT = "direct"
"""The name of our own kernels among the plans."""

TIME = "time"
"""What stands for a plan where nothing was chosen, and `ms` is what a call takes (`times.Key`)."""

Shape = tuple[int, ...]

_log = logging.getLogger(__name__)


class Keyed(Protocol):
    """What a choice depends on, besides the file that it is in: a convolution's `Key`, or `streams.Key`."""

    @property
    def text(self) -> str:
        """The key in a file."""

    @property
    def modest(self) -> int:
        """Bytes of workspace that may be taken for little."""


class Key(NamedTuple):
    """What the choice of a convolution's plan depends on, besides the file that it is in.

    Attributes:
        direction: "forward", "forward+bias", "data" or "weights" (the gradients); `cudnn.RELU` has no choices. With an
            array that is added "forward+sum" or "forward+bias+sum", and perhaps "+relu".
        x, w: shapes of the convolution's source and of its weights; stride, pad, dilation: per spatial axis.
        dtype: NumPy's name of it.
        math: the device's, or for halves, whose products know no other, the dtype again.
        layout: "NCHW" or "NHWC" (the strides of all arrays; shapes are always in the order N, C, spatial).
        limit: bytes of workspace that are allowed.
        room: the bytes that there are for it, all of which may be taken for little; None: not known.
    """

    direction: str
    x: Shape
    w: Shape
    stride: Shape
    pad: Shape
    dilation: Shape
    group: int
    dtype: str
    layout: str
    math: str
    deterministic: bool
    limit: int
    room: int | None = None

    @property
    def most(self) -> int:
        """Bytes of workspace that may be taken."""
        return self.limit if self.room is None else min(self.limit, self.room)

    @property
    def modest(self) -> int:
        """Bytes of workspace that may be taken for little."""
        return min(self.limit // 3, self.most)

    @property
    def y(self) -> Shape:
        """The shape of the convolution's outputs."""
        axes = zip(self.x[2:], self.w[2:], self.stride, self.pad, self.dilation, strict=True)
        return (self.x[0], self.w[0], *((x + 2 * p - d * (k - 1) - 1) // s + 1 for x, k, s, p, d in axes))

    @property
    def text(self) -> str:
        """The key in a file of its math."""
        lists = (("x", self.x), ("w", self.w), ("stride", self.stride), ("pad", self.pad), ("dilation", self.dilation))
        words = [self.direction, *(f"{name}={','.join(map(str, dims))}" for name, dims in lists)]
        words += [f"group={self.group}", self.dtype, self.layout]
        words += ["deterministic"] if self.deterministic else []
        words += [f"limit={self.limit}"] if self.limit != WORKSPACE_LIMIT else []
        words += [f"room={self.room}"] if self.room is not None else []
        return " ".join(words)

    @property
    def mirrored(self) -> Key | None:
        """The key of a gradient for the data that is this convolution, without its bias, with mirrored weights.

        The weights have the axes of inputs and outputs exchanged and their taps in reverse order. cuDNN has faster
        plans for some of these than for the convolution itself. None where there is no such gradient, and for planes
        with their channels last, whose own plans are the fastest.
        """
        pad = tuple(d * (k - 1) - p for k, p, d in zip(self.w[2:], self.pad, self.dilation, strict=True))
        if (
            self.direction not in ("forward", "forward+bias")
            or (self.layout != "NCHW" and len(self.stride) < 3)
            or self.group > 1
            or {*self.stride} != {1}
            or min(pad) < 0
            or math.prod(self.w[2:]) == 1
        ):
            return None
        w = (self.w[1], self.w[0], *self.w[2:])
        return self._replace(direction="data", x=self.y, w=w, pad=pad)

    def parts_into(self, parts: int) -> bool:
        """Whether the images come in so many equal parts that begin where cuDNN takes arrays to begin."""
        if self.x[0] % parts:
            return False
        part, width = self.part(parts), dtypes.of(self.dtype).itemsize
        return all(math.prod(shape) * width % ALIGNMENT == 0 for shape in (part.x, part.y))

    def part(self, parts: int) -> Key:
        """The key of one of so many equal parts of the images."""
        return self._replace(x=(self.x[0] // parts, *self.x[1:])) if parts > 1 else self


class Candidate(NamedTuple):
    """A plan that could be chosen: its name, its place in the list, its workspace in bytes, and a call that runs it."""

    plan: str
    number: int
    workspace: int
    run: Callable[[], None]


class Choice(NamedTuple):
    """A plan that was chosen; `ms` is what it took when it was."""

    plan: str
    number: int
    workspace: int
    ms: float


def choose(timed: Iterable[tuple[Candidate, float]], modest: int) -> Choice:
    """Of the plans within 3% of the fastest that with the least workspace, then the lowest number.

    Plans that want more than `modest` bytes count only if one of them is 1.5 times as fast as all others.
    """
    timed = list(timed)
    fastest = min(ms for _, ms in timed)
    small = [(candidate, ms) for candidate, ms in timed if candidate.workspace <= modest]
    if small and (least := min(ms for _, ms in small)) < fastest * WORTH:
        timed, fastest = small, least
    near = [(candidate, ms) for candidate, ms in timed if ms <= fastest * NEARLY]
    best, ms = min(near, key=lambda item: (item[0].workspace, item[0].number))
    return Choice(best.plan, best.number, best.workspace, round(ms, 5))


class Registry:
    """The choices for one GPU model, cuDNN version and math; `registry` gives the process's only one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._seen: tuple[int, int] | None = None
        self._choices = read(SHIPPED / path.name)

    def find(self, key: Keyed) -> Choice | None:
        """The choice for a key, if there is one."""
        text = key.text
        choice = self._choices.get(text)
        if choice is None:
            with self._lock:
                self._reread()
                choice = self._choices.get(text)
        return choice

    def find_or_register(
        self,
        key: Keyed,
        candidates: Iterable[Candidate],
        measure: Callable[[Candidate], float | None],
        lost: Choice | None = None,
    ) -> Choice:
        """The choice for a key; if there is none, or it is `lost` (cannot be built), the candidates are timed.

        Two threads or processes never time at once: the second one finds the first one's choice. `candidates` is only
        iterated if needed, each measured (ms, None if it cannot run) before the next is asked for.
        Raises DeviceError if none can run.
        """
        choice = self.find(key)
        if choice is not None and choice != lost:
            return choice
        with self._lock, _locked(self.path):
            if lost is not None:
                self._reread()
            choice = self.find(key)
            if choice is not None and choice != lost:
                return choice
            timed = [(c, ms) for c in candidates if (ms := measure(c)) is not None]
            if not timed:
                raise DeviceError(f"no plan can run the convolution {key.text}")
            choice = choose(timed, key.modest)
            self._write({key.text: choice})
            return choice

    def choices(self) -> dict[str, Choice]:
        """All choices by the keys' texts, not to be changed."""
        with self._lock:
            self._reread()
            return self._choices

    def add(self, choices: dict[str, Choice]) -> None:
        """Choices that were made elsewhere, in place of what there is for the same keys."""
        with self._lock, _locked(self.path):
            self._write(choices)

    def _reread(self) -> None:
        try:
            status = self.path.stat()
        except OSError:
            return
        seen = status.st_mtime_ns, status.st_ino
        if seen != self._seen:
            self._seen = seen
            self._choices = {**self._choices, **read(self.path)}

    def _write(self, choices: dict[str, Choice]) -> None:
        self._choices = {**self._choices, **choices}
        if not write(self.path, {**read(self.path), **choices}):
            _log.warning("chosen algorithms cannot be kept in %s: every process will search anew", self.path.parent)


def registry(model: str, version: int, math: str) -> Registry:
    """The registry for a GPU model ("NVIDIA H200"), cuDNN version (91900) and math ("fp32")."""
    with _registries_lock:
        return _registry(folder() / file_name(model, version, math))


_registries_lock = threading.Lock()
_registry = functools.cache(Registry)


def predict(model: str, math: str, key: Keyed) -> Choice | None:
    """The choice that a GPU model would make, from the files of any cuDNN version, the newest first."""
    choices = (each.find(key) for each in registries(model, math))
    return next((choice for choice in choices if choice is not None), None)


def registries(model: str, math: str) -> list[Registry]:
    """Those of a GPU model and math that have files, of the newest version of cuDNN first."""
    places = [(place, _changed(place)) for place in (SHIPPED, folder())]
    return _registries(model, math, *places)


@functools.lru_cache(64)
def _registries(model: str, math: str, *places: tuple[Path, int]) -> list[Registry]:
    """Those of files in folders, of which it is known when they were changed."""
    pattern = file_name(model, None, math)
    versions = {_version(path) for place, _ in places for path in place.glob(pattern)}
    return [registry(model, version, math) for version in sorted(versions, reverse=True)]


def _changed(place: Path) -> int:
    """When something in a folder was made, named or removed last; 0 if there is none."""
    try:
        return os.stat(place).st_mtime_ns
    except OSError:
        return 0


def folder() -> Path:
    """Where the user's own files are."""
    return cache_folder() / "algorithms"


def file_name(model: str, version: int | None, math: str) -> str:
    """The name of a file; with no version a pattern for those of all."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', model)}_cudnn{'*' if version is None else version}_{math}.json"


def _version(path: Path) -> int:
    match = re.search(r"_cudnn(\d+)_", path.name)
    return int(match[1]) if match else 0


def files() -> list[Path]:
    """All files, those of the package first."""
    return [path for place in (SHIPPED, folder()) for path in sorted(place.glob("*.json"))]


def export(target: Path) -> list[Path]:
    """Write all choices, the user's before those of the package, into files of the same names in a folder; their paths.

    OSError where that cannot be.
    """
    target.mkdir(parents=True, exist_ok=True)
    merged: dict[str, dict[str, Choice]] = {}
    for path in files():
        merged.setdefault(path.name, {}).update(read(path))
    for name, choices in merged.items():
        if not write(target / name, choices):
            raise OSError(f"{target / name} cannot be written")
    return [target / name for name in merged]


def read(path: Path) -> dict[str, Choice]:
    """A file's choices by the keys' texts; none, and a warning, if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        return {str(text): _choice(item) for text, item in content["choices"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s is left aside: %s: %s", path, type(error).__name__, error)
        return {}


def _choice(item: Any) -> Choice:
    """What a file has for a key; of a call's time, of which there are many, its ms alone."""
    if isinstance(item, float):
        return Choice(TIME, 0, 0, item)
    return Choice(str(item["plan"]), int(item["number"]), int(item["workspace"]), float(item["ms"]))


def write(path: Path, choices: dict[str, Choice]) -> bool:
    """Write a whole file or none; whether it could be."""
    items = ((text, choices[text]) for text in sorted(choices))
    lines = (f"{json.dumps(text)}: {json.dumps(c.ms if c.plan == TIME else c._asdict())}" for text, c in items)
    return keep(path, ('{"choices": {\n' + ",\n".join(lines) + "\n}}\n").encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """No other process is in here with the same GPU model and cuDNN: what one times another would slow, whatever math.

    Where nothing can be written there is nobody to share with.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            name = path.stem.rpartition("_")[0] or path.stem
            file = stack.enter_context(path.with_name(f"{name}.lock").open("w"))
            if _fcntl is not None:
                _fcntl.flock(file, _fcntl.LOCK_EX)
        yield
