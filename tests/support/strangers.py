"""What tests with files of strangers share: how many examples they take, and what may come of one."""

import contextlib
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobmem.errors import BlobmemError

_MORE = int(os.environ.get("BLOBMEM_FUZZ_EXAMPLES", "0"))


def fuzz(examples):
    """Run a test with so many `chance`, a `random.Random` each, the same ones every time.

    With BLOBMEM_FUZZ_EXAMPLES in the environment as many as that says, and others each time.
    """

    def decorate(test):
        bounded = settings(
            max_examples=_MORE or examples,
            derandomize=not _MORE,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )
        return bounded(given(chance=st.integers(0, 2**64 - 1).map(random.Random))(test))

    return decorate


@contextlib.contextmanager
def success_or_error(*others):
    """A block that may succeed, or raise one BlobmemError (or one of `others`) with a message that fits a screen."""
    try:
        yield
    except (BlobmemError, *others) as error:
        assert 10 < len(str(error)) < 3000, error


@contextlib.contextmanager
def memory_within(nbytes):
    """A block after which the process may never have held so much more than before it; Linux only."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the highest so far
    except OSError:
        pytest.skip("the system does not tell the most memory that a process has held")
    before = _most_held()
    yield
    assert _most_held() - before < nbytes


def _most_held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
