"""Compiled: one walk through a pass, as `rounds` says.

Memories and calls are numbered; of what there are several of each, rows lie one behind another, and `x_of[at]` to
`x_of[at + 1]` are those of number `at`. Bytes and steps are int64, times ms. All is a function of the arguments alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blobmem.ops.host.compiled import borrowing_kernel, borrowing_part, kernel

Ints = np.ndarray
Floats = np.ndarray
Bools = np.ndarray

NONE = -1
"""In place of the number of a memory: there is none."""

BITS = 62
"""Of an int64, for as many flags."""


class Tables(NamedTuple):
    """What is known of a pass.

    Attributes:
        turn: the first step of backward.
        clock: before each step, and at the end.
        fixed, born: of each step, bytes in use beside the arrays, and bytes in use that were not before it.
        start, start_of, end, end_of: by step, which arrays are made in it, and which are read for the last time.
        needed, needed_of: by step, which arrays it needs.
        read, read_of: by array, the steps that need it.
        size, copy, maker: of each array its bytes, the ms of a copy of it, and the call that makes it.
        late: which arrays may be evicted.
        final, final_of: by call, the arrays that it makes.
        take, take_of: by call, rows of what it reads: the memory, the call that made it (NONE if it was there before),
            whether it stays there where nothing is gone, what has the same numbers (NONE if nothing does), and whether
            it is what that memory holds at last.
        write, write_of: by call, rows of what it writes: the memory, its bytes, and whether it need not.
        use, use_of: by array, and behind these by call, the rows of `take` by which it may be needed.
        taker: of each row of `take` the call.
        in_place: which calls may make their output in an array that they read.
        unit, cost, scratch: of each call the first of those that it runs as one with, ms, and bytes while it runs.
        joined: which calls run as one with the one before them, too: those that follow as one with them take nothing.
        memories: how many there are; arrays come first, which alone may be gone.
    """

    turn: int
    clock: Floats
    fixed: Ints
    born: Ints
    start: Ints
    start_of: Ints
    end: Ints
    end_of: Ints
    needed: Ints
    needed_of: Ints
    read: Ints
    read_of: Ints
    size: Ints
    copy: Floats
    maker: Ints
    late: Bools
    final: Ints
    final_of: Ints
    take: Ints
    take_of: Ints
    write: Ints
    write_of: Ints
    use: Ints
    use_of: Ints
    taker: Ints
    in_place: Bools
    unit: Ints
    cost: Floats
    scratch: Ints
    joined: Bools
    memories: int


class _State(NamedTuple):
    """Where a walk is.

    Attributes:
        there, gone: which arrays are on the device, and which are on neither side.
        away: which are evicted after their last use in forward.
        used: of each array that is there, the event at which it was used last.
        costs: ms in which each is made again, if that is not negative.
        rely: by array, bits of those whose costs depend on whether it is gone.
        load, begin: of each event so far, bytes in use, and when it began.
        begun: of each step, its event.
        copies: of each copy back the event by which it has to be there, and the array.
        first, last: of each memory, the first call of a round that reads it, counted from 1, and the last one.
        read: the memories that a round reads.
        needed: which arrays the step needs.
        counts: of events; of copies; of what is `read`.
        held: bytes of what is there; bytes that are too much.
        ms: of calls in rounds and of waits; and the time now.
        next: of each array where in `read` the next step is that needs it.
        after: as `uses` were before a round.
        uses, wants: ms at which each array, and each call, is needed next, be it to make what is gone; infinite if not.
        wanted: of each row of `take` what it needs, as `change` has it.
        runs, found, waiting: calls that are looked at.
        units, ran: of each unit of calls, what has been counted, and whether it has run in a round.
        order: the calls of a round.
        beside: of each memory bytes that a round has of it for a while.
        power, worth, room: as given.
    """

    there: Bools
    gone: Bools
    away: Bools
    used: Ints
    costs: Floats
    rely: Ints
    load: Ints
    begin: Floats
    begun: Ints
    copies: Ints
    first: Ints
    last: Ints
    read: Ints
    needed: Bools
    counts: Ints
    held: Ints
    ms: Floats
    next: Ints
    after: Floats
    uses: Floats
    wants: Floats
    wanted: Ints
    runs: Bools
    found: Ints
    waiting: Ints
    units: Floats
    ran: Bools
    order: Ints
    beside: Ints
    power: float
    worth: Floats
    room: int


@borrowing_part
def _is_gone(gone: Bools, memory: int) -> bool:
    return 0 <= memory < gone.size and gone[memory]


@borrowing_part
def _source(take: Ints, gone: Bools, at: int) -> int:
    """The memory from which a row of `take` is taken, NONE if what it has is to be made."""
    source, stays, same = take[at, 0], take[at, 2], take[at, 3]
    if stays and not _is_gone(gone, source):
        return source
    return same if same != NONE and not _is_gone(gone, same) else NONE


@borrowing_part
def _find_runs(take: Ints, take_of: Ints, gone: Bools, runs: Bools, found: Ints, waiting: Ints, count: int) -> int:
    """Mark the calls without which the first `count` that are `waiting` have nothing to read, and these; how many are
    `found`."""
    total, arrays = 0, gone.size
    while count:
        count -= 1
        call = waiting[count]
        if runs[call]:
            continue
        runs[call] = True
        found[total] = call
        total += 1
        for at in range(take_of[call], take_of[call + 1]):
            # as `_source` says, which would be a call that takes longer
            source, made, stays, same = take[at, 0], take[at, 1], take[at, 2], take[at, 3]
            there = stays and not (source < arrays and gone[source])
            there = there or (same != NONE and not (same < arrays and gone[same]))
            if not there and not runs[made]:
                waiting[count] = made
                count += 1
    return total


@borrowing_part
def _ms_of(unit: Ints, joined: Bools, cost: Floats, found: Ints, total: int, units: Floats) -> float:
    """What the calls that are found take, of those that run as one the longest, or the first where that is `joined`."""
    result = 0.0
    for at in range(total):
        call = found[at]
        if joined[call]:
            result += cost[call]
            units[unit[call]] = np.inf
    for at in range(total):
        call = found[at]
        counted = units[unit[call]]
        if cost[call] > counted:
            result += cost[call] - counted
            units[unit[call]] = cost[call]
    for at in range(total):
        units[unit[found[at]]] = 0.0
    return result


@borrowing_part
def _unmark(runs: Bools, found: Ints, total: int) -> None:
    for at in range(total):
        runs[found[at]] = False


@borrowing_part
def _wanted(take: Ints, gone: Bools, at: int) -> int:
    """What a row of `take` needs, if its call is to run: an array, behind these a call; NONE if it needs neither."""
    source, made, stays, same, own = take[at, 0], take[at, 1], take[at, 2], take[at, 3], take[at, 4]
    there = 0 <= same < gone.size and not gone[same]
    if own and source < gone.size:
        return same if gone[source] and there else source
    if stays:
        return NONE
    if there:
        return same
    return gone.size + made if made >= 0 else NONE


@borrowing_part
def _renew(
    tables: Tables, gone: Bools, following: Ints, uses: Floats, wants: Floats, wanted: Ints, waiting: Ints, count: int
) -> None:
    """Find anew when the first `count` that are `waiting`, arrays and behind these calls, are needed next, and all that
    others are made of."""
    take_of, use, use_of, taker = tables.take_of, tables.use, tables.use_of, tables.taker
    final, final_of, arrays = tables.final, tables.final_of, gone.size
    while count:
        count -= 1
        node = waiting[count]
        result = np.inf
        if node < arrays and following[node] < tables.read_of[node + 1]:
            result = tables.clock[tables.read[following[node]]]
        for at in range(use_of[node], use_of[node + 1]):
            if wanted[use[at]] == node:
                call = taker[use[at]]
                result = min(result, wants[call])
                for made in range(final_of[call], final_of[call + 1]):
                    if gone[final[made]]:
                        result = min(result, uses[final[made]])
        if node < arrays:
            changed, uses[node] = uses[node] != result, result
            call = tables.maker[node] if gone[node] else NONE
        else:
            changed, wants[node - arrays] = wants[node - arrays] != result, result
            call = node - arrays
        if changed and call != NONE:
            for at in range(take_of[call], take_of[call + 1]):
                if wanted[at] != NONE:
                    waiting[count] = wanted[at]
                    count += 1


@borrowing_kernel
def change(
    tables: Tables, gone: Bools, following: Ints, uses: Floats, wants: Floats, wanted: Ints, waiting: Ints, memory: int
) -> None:
    """Let an array be gone, or there again if it was, and find anew when it and others are needed next.

    Args:
        tables: what is known of the pass.
        gone: which arrays are gone.
        following: of each array where in `tables.read` the next step is that needs it.
        uses, wants: of each array, and of each call, the ms at which it is needed next; infinite if it is not.
        wanted: of each row of `tables.take` what it needs, if its call is to run: an array, behind these a call, or
            NONE.
        waiting: scratch, for four times as many as `tables.take` has rows, and those that a step needs.
        memory: which.
    """
    count, call = 0, tables.maker[memory]
    gone[memory] = not gone[memory]
    for at in range(tables.use_of[memory], tables.use_of[memory + 1]):
        row = tables.use[at]
        for _ in range(2):
            if wanted[row] != NONE:
                waiting[count] = wanted[row]
                count += 1
            wanted[row] = _wanted(tables.take, gone, row)
    for at in range(tables.take_of[call], tables.take_of[call + 1]):
        if wanted[at] != NONE:
            waiting[count] = wanted[at]
            count += 1
    waiting[count] = memory
    _renew(tables, gone, following, uses, wants, wanted, waiting, count + 1)


@borrowing_part
def _forget(rely: Ints, costs: Floats, memory: int) -> None:
    """It is gone, or there again, on which it depends how long others take to be made."""
    for block in range(rely.shape[1]):
        bits = rely[memory, block]
        if not bits:
            continue
        rely[memory, block] = 0
        for at in range(min(BITS, costs.size - BITS * block)):
            if bits >> at & 1:
                costs[BITS * block + at] = -1.0


@borrowing_part
def _have(tables: Tables, state: _State, memory: int) -> None:
    if not state.there[memory]:
        state.there[memory] = True
        state.held[0] += tables.size[memory]
        state.used[memory] = state.counts[0]


@borrowing_part
def _drop(tables: Tables, state: _State, memory: int) -> None:
    """It is not there any more, nor was it since it was used last: it has been evicted, or is gone."""
    if not state.there[memory]:
        return
    state.there[memory] = False
    size = tables.size[memory]
    state.held[0] -= size
    for at in range(state.used[memory] + 1, state.counts[0]):
        state.load[at] -= size
    if not state.away[memory]:
        _forget(state.rely, state.costs, memory)
        change(tables, state.gone, state.next, state.uses, state.wants, state.wanted, state.waiting, memory)


@borrowing_part
def _find_cost(tables: Tables, state: _State, memory: int) -> None:
    """Note the ms in which it is made again of what is there."""
    rely, found, take, take_of = state.rely, state.found, tables.take, tables.take_of
    count = 0
    state.waiting[count] = tables.maker[memory]
    count += 1  # a constant would have it compiled once more
    total = _find_runs(take, take_of, state.gone, state.runs, found, state.waiting, count)
    state.costs[memory] = _ms_of(tables.unit, tables.joined, tables.cost, found, total, state.units)
    _unmark(state.runs, found, total)
    for each in range(total):
        for at in range(take_of[found[each]], take_of[found[each] + 1]):
            source, same = take[at, 0], take[at, 3]
            if source < rely.shape[0]:
                rely[source, memory // BITS] |= 1 << memory % BITS
            if 0 <= same < rely.shape[0]:
                rely[same, memory // BITS] |= 1 << memory % BITS


@borrowing_part
def _find_least(tables: Tables, state: _State, now: float, call: int) -> int:
    """Which array to let go, -1 if there is none that is not pinned."""
    there, needed, last, away, costs = state.there, state.needed, state.last, state.away, state.costs
    uses, size, copy, least, found = state.uses, tables.size, tables.copy, np.inf, -1
    # costs and powers take long: bounds come first
    longest = max(tables.clock[tables.clock.size - 1] - now, 1e-3) ** state.power
    for memory in range(there.size):
        if not there[memory] or needed[memory] or last[memory] >= call:
            continue
        value = 0.0
        if uses[memory] < np.inf:
            ms, per = copy[memory], state.worth[memory] / size[memory]
            if not away[memory]:
                ms = max(costs[memory], tables.cost[tables.maker[memory]])  # at least that if not known
            if ms * per >= least * longest:
                continue
            per /= max(uses[memory] - now, 1e-3) ** state.power
            if costs[memory] < 0 and not away[memory]:
                if ms * per >= least:
                    continue
                _find_cost(tables, state, memory)
                ms = costs[memory]
            value = ms * per
        if value < least:
            least, found = value, memory
    return found


@borrowing_part
def _fit(tables: Tables, state: _State, step: int, other: int, call: int) -> bool:
    """Let arrays go until there is room for so many other bytes, and say whether there is."""
    over = other + state.held[0] - state.room
    if over > 0:
        while over > 0:
            found = _find_least(tables, state, tables.clock[step], call)
            if found < 0:
                break
            _drop(tables, state, found)
            over -= tables.size[found]
        state.held[1] = max(state.held[1], over)
    return over <= 0


@borrowing_part
def _run(tables: Tables, state: _State, step: int, other: int, call: int, ms: float) -> bool:
    """Let so many ms go by, with room for so many other bytes, and say whether there is."""
    fits = other + state.held[0] <= state.room or _fit(tables, state, step, other, call)
    at = state.counts[0]
    for row in range(tables.needed_of[step], tables.needed_of[step + 1]):
        state.used[tables.needed[row]] = at
    for row in range(state.counts[2]):
        memory = state.read[row]
        if memory < state.there.size and state.last[memory] >= call:
            state.used[memory] = at
    state.load[at], state.begin[at] = other + state.held[0], state.ms[1]
    state.counts[0] += 1
    state.ms[1] += ms
    return fits


@borrowing_part
def _fetch(tables: Tables, state: _State, memory: int, step: int, other: int, call: int) -> None:
    """Have one that is evicted back by the next event, beside so many other bytes and what is pinned."""
    if not state.away[memory] or state.there[memory]:
        return
    _fit(tables, state, step, other + tables.size[memory], call)
    at = state.counts[1]
    state.copies[at, 0], state.copies[at, 1] = state.counts[0], memory
    state.counts[1] += 1
    _have(tables, state, memory)


@kernel
def waits(events: Ints, sizes: Ints, copy: Floats, begin: Floats, load: Ints, room: int, turn: int) -> float:
    """For how many ms copies back are waited for: they follow one another, each as late as will do, and since when
    there is room, in backward; what is needed first has the room.

    Args:
        events: of each copy, in their order, the event by which it has to be there.
        sizes, copy: of each, bytes and ms.
        begin, load: of each event when it begins, if nothing is waited for, and bytes in use, to which is added what
            is there earlier for the copies.
        room: bytes that there are.
        turn: the first event of backward.
    """
    count, latest, waited, done, known = events.size, np.inf, 0.0, 0.0, 0
    wanted, delays = np.empty(count), np.zeros(begin.size)  # delays are known up to an event
    for at in range(count - 1, -1, -1):
        latest = min(latest, begin[events[at]]) - copy[at]
        wanted[at] = latest
    for at in range(count):
        event = since = events[at]
        while since > turn and begin[since] > wanted[at] and load[since - 1] + sizes[at] <= room:
            since -= 1
            load[since] += sizes[at]
        while known <= event:
            delays[known] = waited
            known += 1
        done = max(done, begin[since] + delays[since]) + copy[at]
        waited += max(0.0, done - begin[event] - waited)
    return waited


@borrowing_part
def _targets(tables: Tables, state: _State, gone: Bools, step: int) -> int:
    """Put the calls that make what a step needs, and is gone, down as `waiting`, and say how many."""
    count = 0
    for at in range(tables.needed_of[step], tables.needed_of[step + 1]):
        if gone[tables.needed[at]]:
            state.waiting[count] = tables.maker[tables.needed[at]]
            count += 1
    return count


@borrowing_part
def _find_round(tables: Tables, state: _State, gone: Bools, step: int) -> int:
    """Find the calls of the round before a step, where these are gone, and mark them; how many there are."""
    count = _targets(tables, state, gone, step)
    return _find_runs(tables.take, tables.take_of, gone, state.runs, state.found, state.waiting, count)


@borrowing_part
def _spare(tables: Tables, state: _State, step: int, ms: float, count: int, gone: Bools, spared: Floats) -> None:
    """Of what a round's calls make, and could be evicted, add by how many ms less would run."""
    for each in range(count):
        call = state.order[each]
        for at in range(tables.final_of[call], tables.final_of[call + 1]):
            memory = tables.final[at]
            if gone[memory] and tables.late[memory]:
                gone[memory] = False
                total = _find_round(tables, state, gone, step)
                spared[memory] += ms - _ms_of(tables.unit, tables.joined, tables.cost, state.found, total, state.units)
                _unmark(state.runs, state.found, total)
                gone[memory] = True


@borrowing_part
def _want(tables: Tables, state: _State, step: int, call: int, count: int, gone: Bools, short: Bools) -> None:
    """Of what could be evicted so that a call would not run in a round, want the smallest."""
    least = NONE
    for each in range(count):
        other = state.order[each]
        for at in range(tables.final_of[other], tables.final_of[other + 1]):
            memory = tables.final[at]
            if gone[memory] and tables.late[memory] and (least == NONE or tables.size[memory] < tables.size[least]):
                gone[memory] = False
                total = _find_round(tables, state, gone, step)
                if not state.runs[call]:
                    least = memory
                _unmark(state.runs, state.found, total)
                gone[memory] = True
    if least != NONE:
        short[least] = True


@borrowing_part
def _row_source(take: Ints, gone: Bools, at: int) -> int:
    """The memory from which a row of `take` is taken in a round, or which is made for it."""
    source = _source(take, gone, at)
    return take[at, 0] if source == NONE else source


@borrowing_part
def _find_last(tables: Tables, state: _State, count: int, gone: Bools) -> None:
    """Note by which calls of a round, so many in their order, each memory is read first and last."""
    for each in range(count):
        call = state.order[each]
        for at in range(tables.take_of[call], tables.take_of[call + 1]):
            source = _row_source(tables.take, gone, at)
            if not state.first[source]:
                state.first[source] = call + 1
                state.read[state.counts[2]] = source
                state.counts[2] += 1
            state.last[source] = call


@borrowing_part
def _forget_round(tables: Tables, state: _State, count: int) -> None:
    """A round of so many calls is over."""
    for at in range(state.counts[2]):
        state.first[state.read[at]], state.last[state.read[at]] = 0, NONE
    state.counts[2] = 0
    for each in range(count):
        call = state.order[each]
        state.ran[tables.unit[call]] = False
        for at in range(tables.write_of[call], tables.write_of[call + 1]):
            state.beside[tables.write[at, 0]] = 0


@borrowing_part
def _hold(tables: Tables, state: _State, call: int, gone: Bools, made: Bools) -> int:
    """Have what a call of a round makes; by how many bytes more there are of what is not to stay."""
    more, held = 0, state.beside
    if tables.in_place[call]:
        for at in range(tables.take_of[call], tables.take_of[call + 1]):
            source = tables.take[at, 0]
            if state.last[source] == call:
                more -= held[source]
                held[source] = 0
    for at in range(tables.write_of[call], tables.write_of[call + 1]):
        memory, optional = tables.write[at, 0], tables.write[at, 2]
        final = _is_gone(gone, memory) and tables.maker[memory] == call
        if not final and (not optional or state.last[memory] > call):
            more += tables.write[at, 1] - held[memory]
            held[memory] = tables.write[at, 1]
    for at in range(tables.final_of[call], tables.final_of[call + 1]):
        memory = tables.final[at]
        if gone[memory] and (state.after[memory] < np.inf or state.last[memory] > call):
            more -= held[memory]
            held[memory] = 0
            _have(tables, state, memory)
            _forget(state.rely, state.costs, memory)
            change(tables, state.gone, state.next, state.uses, state.wants, state.wanted, state.waiting, memory)
            made[memory] = True
    return more


@borrowing_part
def _let_go(tables: Tables, state: _State, call: int, gone: Bools) -> int:
    """What is not to stay and a call of a round is the last to use is not there any more: how many bytes that are."""
    less, held = 0, state.beside
    for at in range(tables.take_of[call], tables.take_of[call + 1]):
        source = _row_source(tables.take, gone, at)
        if state.last[source] <= call:
            less += held[source]
            held[source] = 0
    for at in range(tables.write_of[call], tables.write_of[call + 1]):
        memory = tables.write[at, 0]
        if state.last[memory] <= call:
            less += held[memory]
            held[memory] = 0
    return less


@borrowing_part
def _put_in_order(state: _State, total: int) -> int:
    """Note the calls that are found, so many, and marked, in the `order` in which they run; how many there are."""
    count, low, high = 0, state.runs.size, NONE
    for at in range(total):
        low, high = min(low, state.found[at]), max(high, state.found[at])
    for call in range(low, high + 1):
        if state.runs[call]:
            state.order[count] = call
            count += 1
    return count


@borrowing_part
def _round(tables: Tables, state: _State, step: int, spared: Floats, short: Bools, gone: Bools, made: Bools) -> None:
    """Make what a step needs and is gone, and say what is `gone` before, and what is `made` and stays.

    What could be evicted, and by how many ms less then runs, is added to `spared`; and `short` is what has to be.
    """
    for memory in range(gone.size):
        gone[memory], made[memory] = state.gone[memory], False
    total = _find_round(tables, state, gone, step)
    ms = _ms_of(tables.unit, tables.joined, tables.cost, state.found, total, state.units)
    count = _put_in_order(state, total)
    _unmark(state.runs, state.found, total)
    state.ms[0] += ms
    _spare(tables, state, step, ms, count, gone, spared)
    _find_last(tables, state, count, gone)
    other, fits = tables.fixed[step] - tables.born[step], True
    for memory in range(gone.size):
        state.after[memory] = state.uses[memory]
    for each in range(count):
        call = state.order[each]
        for at in range(tables.take_of[call], tables.take_of[call + 1]):
            source = _source(tables.take, gone, at)
            if 0 <= source < gone.size and state.first[source] == call + 1:
                _fetch(tables, state, source, step, other, call)
        other += _hold(tables, state, call, gone, made)
        took = 0.0 if state.ran[tables.unit[call]] else tables.cost[call]
        state.ran[tables.unit[call]] = True
        if not _run(tables, state, step, other + tables.scratch[call], call, took) and fits:
            fits = False
            _want(tables, state, step, call, count, gone, short)
        other -= _let_go(tables, state, call, gone)
    for memory in range(gone.size):
        made[memory] = made[memory] and state.there[memory]
    _forget_round(tables, state, count)


@borrowing_part
def _take(tables: Tables, state: _State, step: int, spared: Floats, short: Bools, gone: Bools, made: Bools) -> bool:
    """The next step, in which what is gone may have to be made: whether it had to."""
    rounded, other, never = False, tables.fixed[step], tables.unit.size
    rows = range(tables.needed_of[step], tables.needed_of[step + 1])
    for row in rows:
        state.needed[tables.needed[row]] = True
    if step >= tables.turn:
        for row in rows:
            memory = tables.needed[row]
            rounded = rounded or not (state.there[memory] or state.away[memory])
        if rounded:
            _round(tables, state, step, spared, short, gone, made)
        for row in rows:
            _fetch(tables, state, tables.needed[row], step, other, never)
    state.begun[step] = state.counts[0]
    _run(tables, state, step, other, never, tables.clock[step + 1] - tables.clock[step])
    for row in rows:
        state.needed[tables.needed[row]] = False
    return rounded


@borrowing_part
def _pass(tables: Tables, state: _State, step: int) -> None:
    """A step is over: what it needed is needed by later ones."""
    count = 0
    for at in range(tables.needed_of[step], tables.needed_of[step + 1]):
        state.next[tables.needed[at]] += 1
        state.waiting[count] = tables.needed[at]
        count += 1
    _renew(tables, state.gone, state.next, state.uses, state.wants, state.wanted, state.waiting, count)


@borrowing_kernel
def _walk(
    tables: Tables, state: _State, leaves: Ints, order: Ints, rounds: Bools, spared: Floats, short: Bools, gone: Bools,
    made: Bools,
) -> None:  # fmt: skip
    """As `walk` says; `order` is that of `leaves`, and what is `gone` and `made` is scratch."""
    left = 0
    for at in range(state.wanted.size):
        state.wanted[at] = _wanted(tables.take, state.gone, at)
    for step in range(tables.fixed.size):
        for at in range(tables.start_of[step], tables.start_of[step + 1]):
            _have(tables, state, tables.start[at])
        while left < order.size and leaves[order[left]] <= step:
            if leaves[order[left]] >= 0:
                _drop(tables, state, order[left])
            left += 1
        rounded = _take(tables, state, step, spared, short, gone, made)
        if rounded and rounds.shape[0]:
            for memory in range(gone.size):
                rounds[step - tables.turn, 0, memory] = True
                rounds[step - tables.turn, 1, memory] = gone[memory]
                rounds[step - tables.turn, 2, memory] = made[memory]
        for at in range(tables.end_of[step], tables.end_of[step + 1]):
            _drop(tables, state, tables.end[at])
        _pass(tables, state, step)


def walk(
    tables: Tables, room: int, power: float, worth: Floats, leaves: Ints, brought: tuple[Ints, Ints, Floats],
    rounds: Bools, spared: Floats, short: Bools,
) -> tuple[float, int]:  # fmt: skip
    """Walk through a pass: the ms of calls in rounds and of waits, and how many bytes are too much.

    Args:
        tables: what is known of it.
        room: bytes that there are.
        power: of the time until an array is needed next, by which its bytes count as freed.
        worth: how many times as much as by that it is worth to keep each.
        leaves: of each array the step by which it has been evicted, -1 if it is not.
        brought: the steps of backward that bring evicted state, the bytes of each, and the ms of a copy.
        rounds: of shape (steps of backward, 3, arrays), or of none: whether there is a round, in all; what is gone
            before it; and what is made in it.
        spared, short: of each array, as `_round` has them; from 0 on.
    """
    arrays, calls, steps, rows = len(tables.size), len(tables.unit), len(tables.fixed), len(tables.take)
    backward = steps - tables.turn
    most, following = steps + backward * calls, tables.read_of[:-1].copy()
    first = np.append(tables.read, 0)[following]
    uses = np.where(following < tables.read_of[1:], tables.clock[first], np.inf)
    flags = np.zeros((5, arrays), np.bool_)
    there, gone, needed, before, made = (flags[at] for at in range(5))
    state = _State(
        there, gone, leaves >= 0, np.zeros(arrays, np.int64), np.full(arrays, -1.0),
        np.zeros((arrays, arrays // BITS + 1), np.int64), np.empty(most, np.int64), np.empty(most),
        np.empty(steps, np.int64), np.empty((2 * backward * arrays + 1, 2), np.int64),
        np.zeros(tables.memories, np.int64), np.full(tables.memories, NONE, np.int64),
        np.empty(tables.memories, np.int64), needed, np.zeros(3, np.int64),
        np.zeros(2, np.int64), np.zeros(2), following, np.empty(arrays), uses, np.full(calls, np.inf),
        np.empty(rows, np.int64), np.zeros(calls, np.bool_), np.empty(calls, np.int64),
        np.empty(4 * rows + len(tables.read) + 1, np.int64), np.zeros(calls), np.zeros(calls, np.bool_),
        np.empty(calls, np.int64), np.zeros(tables.memories, np.int64), power, worth, room,
    )  # fmt: skip
    _walk(tables, state, leaves, np.argsort(leaves, kind="stable"), rounds, spared, short, before, made)
    begin, load = state.begin[: state.counts[0]], state.load[: state.counts[0]]
    events, back = state.copies[: state.counts[1]].T
    at, nbytes, ms = brought
    events, sizes = np.append(events, state.begun[at]), np.append(tables.size[back], nbytes)
    order, copy = np.argsort(events, kind="stable"), np.append(tables.copy[back], ms)
    waited = waits(events[order], sizes[order], copy[order], begin, load, room, tables.turn)
    return float(state.ms[0] + waited), int(state.held[1])
