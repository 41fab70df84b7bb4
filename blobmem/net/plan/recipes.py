"""What searches for plans have found, kept in files: a net under a limit is planned by what was found best for the same
net in another process, without a search.

A file has the recipe of a plan (`ways.Recipe`), in which arrays are numbers: positions among what the calls use, which
are the same each time. It is named by a digest of all that a search depends on but for times of calls: the calls, the
room, the device, the program. A plan that is made of it counts if it fits, and takes as long as it was reckoned to when
it was found: so times of its calls are what they were then. Else there is a search.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobmem.devices.cuda.compiler import cache_folder, keep
from blobmem.errors import OutOfDeviceMemory
from blobmem.memory import SyncedMemory
from blobmem.net.plan.abreast import Abreast
from blobmem.net.plan.again import Less, Round
from blobmem.net.plan.divisions import way_divided
from blobmem.net.plan.fitting import has_room, room_of, without
from blobmem.net.plan.places import draft
from blobmem.net.plan.slices import Division
from blobmem.net.plan.sooner import with_moves
from blobmem.net.plan.times import Times, reckon
from blobmem.net.plan.ways import Made, Recipe, way_of
from blobmem.ops.call import Call, Operand, memories
from blobmem.proto.files import digest_of
from blobmem.version import __version__

if TYPE_CHECKING:
    from blobmem.net.net import Net

log = logging.getLogger("blobmem")

SAME = 1e-6
"""The relative difference of two times that are the same."""

PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of attributes of calls that plans may depend on; others stand for themselves."""


def folder() -> Path:
    """Where the files are, beside what else was found out about GPUs."""
    return cache_folder() / "plans"


class Kept:
    """The file of a net's plan.

    Args:
        net, made: the usual calls of the net, for which there is no room.
        state: what may be evicted of its state.
    """

    def __init__(self, net: Net, made: Made, state: Sequence[SyncedMemory]) -> None:
        self._net, self._usual, self._state = net, made, [*state]
        self._path = folder() / f"{_digest(net, made)}.json"

    def find(self) -> Made | None:
        """The calls as they were found to be best, drafted; None if that is not known, or times are others now: the net
        is then as it was."""
        found = self._found()
        self._net.take_abreast(None)
        if found is None:
            self._net.evict_state({})
            self._net._have(self._usual)
        return found

    def _found(self) -> Made | None:
        try:
            content = json.loads(self._path.read_bytes())
            if not math.isclose(content["usual_ms"], self._usual_ms(), rel_tol=SAME):
                return None  # by other times its updates and copies may be elsewhere
            found = self._made(content)
            if found is None or not math.isclose(found.ms, content["ms"], rel_tol=SAME):
                return None
            return found if has_room(self._net, found) else None
        except (OSError, OutOfDeviceMemory):  # there is none; or algorithms are others, which want more
            return None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s is left aside: %s: %s", self._path, type(error).__name__, error)
            return None

    def keep(self, found: Made) -> None:
        """Keep how these calls came about, which were found to be best."""
        net, recipe, number = self._net, found.recipe, {memory: at for at, memory in enumerate(self._state)}
        content = {
            **recipe._asdict(),
            "less": None if recipe.less is None else self._packed(recipe),
            "rooms": [(layer, op, nbytes) for (layer, op), nbytes in recipe.rooms],
            "moves": recipe.moves and (recipe.moves[0], [*recipe.moves[1].items()]),
            "state": [(number[memory], staying) for memory, staying in found.state.items()],
            "spread": found.spread, "ms": found.ms, "usual_ms": self._usual_ms(),
            "calls": len(found.forward) + len(found.backward),
        }  # fmt: skip
        net.take_abreast(None)
        keep(self._path, json.dumps(content, default=int).encode())  # NumPy's integers, too

    def _usual_ms(self) -> float:
        return reckon(self._usual.places, Times(self._net.device)).ms

    def _packed(self, recipe: Recipe) -> Mapping[str, Any]:
        """By what less is in use, in numbers."""
        less = recipe.less
        assert less is not None
        number = {memory: at for at, memory in enumerate(self._used(recipe.abreast, less.apart))}

        def numbers(arrays: Iterable[SyncedMemory]) -> list[int]:
            return sorted(number[memory] for memory in arrays)

        return {
            "anew": numbers(less.anew),
            "held": numbers(less.held),
            "rounds": [(number[each.memory], each.use, numbers(each.made), numbers(each.gone)) for each in less.rounds],
            "apart": [(layer, op, count) for (layer, op), count in less.apart.items()],
        }

    def _unpacked(self, content: Mapping[str, Any], abreast: Abreast | None) -> Less:
        apart = {(layer, op): count for layer, op, count in content["apart"]}
        used = self._used(abreast, apart)
        rounds = [
            Round(used[memory], use, *({used[each] for each in arrays} for arrays in both))
            for memory, use, *both in content["rounds"]
        ]
        anew, held = ({used[each] for each in content[name]} for name in ("anew", "held"))
        return Less(anew, held, rounds, apart)

    def _used(self, abreast: Abreast | None, apart: Mapping[tuple[int, Any], int]) -> list[SyncedMemory]:
        """What the calls of layers use, in an order that is the same each time."""
        self._net.take_abreast(abreast)
        emitted = self._net._emitted_with(apart)
        return [*dict.fromkeys(memories([*emitted.forward, *emitted.backward]))]

    def _made(self, content: Mapping[str, Any]) -> Made | None:
        """The calls that came about so, drafted and reckoned."""
        net, times = self._net, Times(self._net.device)
        abreast = None if content["abreast"] is None else Abreast(*content["abreast"])
        state = {self._state[at]: staying for at, staying in content["state"]}
        net.evict_state(state, content["spread"])
        net.take_abreast(abreast)
        less = None if content["less"] is None else self._unpacked(content["less"], abreast)
        division = tuple(Division(*each) for each in content["division"])
        rooms = tuple(((layer, op), size) for layer, op, size in content["rooms"])
        made = net._made(less, 1, bring=not division)
        if not division:
            made.drawn = draft(net, made.schedules, made.kept)
        if content["away"] is not None:
            way = way_of(net, made) if not division else way_divided(net, made, division, rooms)
            if way is None:
                return None
            net._have(way.made)
            away = [way.found[at] for at in content["away"]]
            made = without(net, way, away, times, content["enough"], content["room"])
        made.state = {memory: memory.staying for memory in net._evicted}
        made.spread = net.spread
        if content["calls"] != len(made.forward) + len(made.backward):
            return None  # by other times some state stays between two uses, or does not
        made.ms = reckon(made.places, times).ms
        if content["moves"] is None:
            return made
        net._have(made)
        tight, moves = content["moves"]
        return with_moves(net, made, (tight, room_of(net, made)), times, dict(moves))


def _digest(net: Net, made: Made) -> str:
    """Of what a search depends on but for times of calls: of a net with these usual calls."""
    device, numbers = net.device, dict[SyncedMemory, int]()
    kept = {*made.kept}

    def of_operand(operand: Operand | None) -> Any:
        if operand is None:
            return None
        memory, blob = operand.memory, operand.blob
        number = numbers.setdefault(memory, len(numbers))
        return (
            number, operand.offset, operand.op_shape, blob.shape, str(blob.dtype), operand.diff, operand.intent.value,
            operand.accumulate, operand.part, memory in kept,
        )  # fmt: skip

    def of_call(call: Call) -> Any:
        attributes = [(name, value) for name, value in sorted(call.attributes.items()) if type(value) in PLAIN]
        op = call.op if isinstance(call.op, str) else getattr(call.op, "__qualname__", type(call.op).__name__)
        return call.layer, call.layer_name, op, call.once, [*map(of_operand, call.operands)], attributes

    facts = (
        __version__, _sources(), device.family, getattr(device, "model", ""), getattr(device, "math", ""),
        getattr(device, "deterministic", True), device.most_bytes, room_of(net, made), sorted(net.passes),
        net._images_last, net._loss_scale is None, net._is_watched(),
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode())
    for each in chain(made.forward, made.backward, *net.updates_after()):
        digest.update(repr(of_call(each)).encode())
    return digest.hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """Of the program that searches, so that whoever changes it sees what it does now."""
    return digest_of(sorted(Path(__file__).parent.glob("*.py")))
