import contextlib
import threading

import pytest

from blobmem.devices.cuda.turns import Turns


def measure_beside(turns):
    """While this thread runs, another wants to be alone; what is to be called after the run, when it has been."""
    seen = []

    def measure():
        with turns.alone():
            seen.append("alone")

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join(0.05)
    seen.append("run")

    def finish():
        thread.join(5)
        assert seen == ["run", "alone"]

    return finish


def test_nobody_runs_beside_one_who_is_alone():
    turns, seen, begun, go = Turns(), [], threading.Event(), threading.Event()

    def run():
        with turns:
            seen.append("run")

    def measure():
        with turns.alone():
            begun.set()
            go.wait(5)
            with turns:  # its own
                seen.append("alone")

    measuring = threading.Thread(target=measure)
    measuring.start()
    begun.wait(5)
    running = [threading.Thread(target=run) for _ in range(3)]
    for thread in running:
        thread.start()
    assert seen == []
    go.set()
    for thread in (measuring, *running):
        thread.join(5)
    assert seen == ["alone", "run", "run", "run"]


def test_it_waits_for_those_who_run():
    turns = Turns()
    with turns, turns:
        finish = measure_beside(turns)
    finish()


def test_two_in_the_middle_of_runs_become_alone_one_after_the_other():
    turns, seen, both = Turns(), [], threading.Barrier(2)

    def run(name):
        with turns:
            both.wait(5)
            with turns.alone(), turns.alone():
                seen.append(name)
                with turns:
                    seen.append(name)
        with turns.alone():  # nothing of its own run is left
            pass

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert sorted(seen) == ["a", "a", "b", "b"] and seen[0] == seen[1]


def test_a_run_goes_on_after_it_was_alone():
    turns = Turns()
    with turns:
        with turns.alone():
            pass
        finish = measure_beside(turns)
    finish()


def test_a_run_within_a_run_is_not_kept_waiting():
    turns, seen, begun, go = Turns(), [], threading.Event(), threading.Event()

    def measure():
        begun.set()
        with turns.alone():
            seen.append("alone")

    def run():
        with turns:
            threading.Thread(target=measure).start()
            begun.wait(5)
            go.wait(0.05)
            with turns:
                seen.append("run")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and seen[0] == "run"


@pytest.mark.parametrize("inside", [False, True])
def test_who_is_interrupted_while_waiting_leaves_nothing_behind(inside, monkeypatch):
    turns = Turns()

    def interrupt():
        raise KeyboardInterrupt

    other = threading.Thread(target=lambda: None)
    other.start()
    turns._runs[other.ident] = 1  # somebody else runs
    monkeypatch.setattr(turns._changed, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt), turns if inside else contextlib.nullcontext(), turns.alone():
        pass
    monkeypatch.undo()
    del turns._runs[other.ident]
    with turns, turns.alone():
        pass
    assert not turns._runs and turns._alone is None
