import json
import multiprocessing
import threading
import time

import pytest

from blobmem.errors import DeviceError
from blobmem.ops.cuda import algorithms
from blobmem.ops.cuda.algorithms import WORKSPACE_LIMIT, Candidate, Choice, Key, Registry

KEY = Key(
    "forward", (2, 3, 8, 8), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1, "float32", "NCHW", "fp32", False, WORKSPACE_LIMIT
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOBMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(algorithms, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache" / "algorithms"


def plan(name, number=0, workspace=0):
    return Candidate(name, number, workspace, lambda: None)


def search(registry, times, key=KEY, **options):
    """Register the choice among plans of these times, and count what was measured."""
    measured = []

    def measure(candidate):
        measured.append(candidate.plan)
        return times[candidate.plan]

    return registry.find_or_register(key, [plan(name, i) for i, name in enumerate(times)], measure, **options), measured


def test_outputs_of_a_key():
    key = KEY._replace(x=(5, 4, 11, 9), w=(6, 2, 3, 2), stride=(2, 1), pad=(1, 0), dilation=(2, 3), group=2)
    assert key.y == (5, 6, 5, 6)


def test_texts_differ_where_anything_does():
    others = {
        "direction": "data", "x": (2, 3, 8, 9), "w": (4, 3, 3, 1), "stride": (1, 2), "pad": (0, 1), "dilation": (2, 1),
        "group": 3, "dtype": "float64", "layout": "NHWC", "deterministic": True, "limit": 5,
    }  # fmt: skip
    texts = {KEY.text} | {KEY._replace(**{name: value}).text for name, value in others.items()}
    assert len(texts) == len(others) + 1


@pytest.mark.parametrize(
    "timed, chosen",
    [
        ([(plan("a", 0, 9), 2.0), (plan("b", 1, 50), 1.0)], "b"),
        ([(plan("a", 0, 100), 1.0), (plan("b", 1, 50), 1.029)], "b"),
        ([(plan("a", 0, 100), 1.0), (plan("b", 1, 50), 1.031)], "a"),
        ([(plan("b", 1, 7), 1.0), (plan("a", 0, 7), 1.01)], "a"),
        ([(plan("a", 3, 0), 1.03), (plan("b", 1, 7), 1.0), (plan("c", 2, 0), 1.02)], "c"),
    ],
)
def test_nearly_as_fast_with_less_workspace_wins(timed, chosen):
    assert algorithms.choose(timed, 100).plan == chosen


@pytest.mark.parametrize("ms, chosen", [(1.0, "small"), (0.67, "small"), (0.66, "large"), (0.1, "large")])
def test_much_workspace_has_to_be_worth_it(ms, chosen):
    timed = [(plan("slow", 0, 50), 2.0), (plan("small", 1, 100), 1.0), (plan("large", 2, 101), ms)]
    assert algorithms.choose(timed, 100).plan == chosen
    assert algorithms.choose(timed[2:], 100).plan == "large"


def test_the_second_search_measures_nothing(cache):
    registry = Registry(cache / "a.json")
    assert search(registry, {"slow": 2.0, "fast": 1.0}) == (Choice("fast", 1, 0, 1.0), ["slow", "fast"])
    assert search(registry, {"faster": 0.1}) == (Choice("fast", 1, 0, 1.0), [])
    assert search(Registry(cache / "a.json"), {"faster": 0.1})[1] == []  # a later process


def test_a_registry_sees_what_another_has_written(cache):
    mine, other = Registry(cache / "a.json"), Registry(cache / "a.json")
    assert mine.find(KEY) is None
    search(other, {"plan": 1.0})
    assert mine.find(KEY) == Choice("plan", 0, 0, 1.0)


def test_candidates_are_not_asked_for_when_there_is_a_choice(cache):
    registry = Registry(cache / "a.json")
    search(registry, {"plan": 1.0})

    def candidates():
        raise AssertionError
        yield

    assert registry.find_or_register(KEY, candidates(), lambda _: 1.0).plan == "plan"


def test_plans_that_cannot_run_are_passed_over(cache):
    registry = Registry(cache / "a.json")
    assert search(registry, {"broken": None, "works": 3.0})[0].plan == "works"
    with pytest.raises(DeviceError, match="no plan can run"):
        search(registry, {"broken": None}, KEY._replace(group=2))


def test_a_lost_plan_is_replaced_once(cache):
    registry = Registry(cache / "a.json")
    lost, _ = search(registry, {"old": 1.0})
    assert search(registry, {"new": 1.0}, lost=lost)[0].plan == "new"
    assert search(registry, {"newer": 1.0}, lost=lost) == (Choice("new", 0, 0, 1.0), [])
    assert Registry(cache / "a.json").find(KEY).plan == "new"


def test_threads_search_once(cache):
    registry, measured, choices = Registry(cache / "a.json"), [], []

    def measure(candidate):
        measured.append(candidate.plan)
        time.sleep(0.02)
        return 1.0

    def run(name):
        choices.append(registry.find_or_register(KEY, [plan(name)], measure))

    threads = [threading.Thread(target=run, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1 and len(set(choices)) == 1


def _process(path, name, queue):
    registry = Registry(path)
    for group in range(1, 6):
        measured = []

        def measure(candidate, measured=measured):
            measured.append(candidate.plan)
            time.sleep(0.005)
            return 1.0

        choice = registry.find_or_register(KEY._replace(group=group), [plan(name)], measure)
        queue.put((group, choice.plan, len(measured)))


def test_processes_search_once_and_lose_nothing(cache):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_process, args=(cache / "a.json", str(i), queue)) for i in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in range(4 * 5)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for group in range(1, 6):
        plans = {name for place, name, _ in found if place == group}
        assert len(plans) == 1
        assert sum(count for place, _, count in found if place == group) == 1
    assert len(algorithms.read(cache / "a.json")) == 5
    assert sorted(path.name for path in cache.iterdir()) == ["a.json", "a.lock"]


def test_nobody_times_beside_another_math(cache):
    cache.mkdir(parents=True)
    one, two = (cache / algorithms.file_name("GPU X", 91900, math) for math in ("fp32", "tf32"))
    entered = threading.Event()

    def other():
        with algorithms._locked(two):
            entered.set()

    thread = threading.Thread(target=other)
    with algorithms._locked(one):
        thread.start()
        assert not entered.wait(0.05)
    thread.join(5)
    assert entered.is_set() and [path.name for path in cache.iterdir()] == ["GPU-X_cudnn91900.lock"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"choices": 3}', b'{"choices": {"a": {}}}', b'{"choices": {"a": 1}}', b"\xff\xfe"]
)
def test_a_damaged_file_is_left_aside_and_then_replaced(cache, content, caplog):
    cache.mkdir(parents=True)
    (cache / "a.json").write_bytes(content)
    registry = Registry(cache / "a.json")
    assert registry.find(KEY) is None
    assert "left aside" in caplog.text
    search(registry, {"plan": 1.0})
    assert Registry(cache / "a.json").find(KEY).plan == "plan"


def test_without_a_place_to_write_choices_last_as_long_as_the_process(cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    registry = Registry(cache / "a.json")
    search(registry, {"plan": 1.0})
    assert "cannot be kept" in caplog.text
    assert search(registry, {"other": 1.0}) == (Choice("plan", 0, 0, 1.0), [])


def test_one_registry_in_a_process(cache):
    assert algorithms.registry("NVIDIA H200", 91900, "fp32") is algorithms.registry("NVIDIA H200", 91900, "fp32")
    assert algorithms.registry("NVIDIA H200", 91900, "fp32").path == cache / "NVIDIA-H200_cudnn91900_fp32.json"
    assert algorithms.registry("NVIDIA H200", 91900, "tf32").find(KEY) is None


def test_shipped_choices_are_found_and_not_copied(cache):
    name = algorithms.file_name("NVIDIA H200", 91900, "fp32")
    assert algorithms.write(algorithms.SHIPPED / name, {KEY.text: Choice("eng1", 0, 128, 0.5)})
    registry = Registry(cache / name)
    assert registry.find(KEY) == Choice("eng1", 0, 128, 0.5)
    search(registry, {"mine": 1.0}, KEY._replace(group=3))
    assert list(json.loads((cache / name).read_text())["choices"]) == [KEY._replace(group=3).text]


def test_predictions_take_the_newest_version_that_knows(cache):
    for version, key in ((90000, KEY), (91900, KEY), (100000, KEY._replace(group=3))):
        name = algorithms.file_name("NVIDIA H200", version, "fp32")
        algorithms.write(cache / name, {key.text: Choice(f"of {version}", 0, 0, 1.0)})
    assert algorithms.predict("NVIDIA H200", "fp32", KEY).plan == "of 91900"
    assert algorithms.predict("NVIDIA H200", "tf32", KEY) is None
    assert algorithms.predict("NVIDIA H100", "fp32", KEY) is None
