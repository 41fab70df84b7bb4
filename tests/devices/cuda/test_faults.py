"""Bad values that kernels found: raised once, by the layer's name, whichever thread queued what."""

import threading

import numpy as np
import pytest

from blobmem.devices.cuda.faults import Faults
from blobmem.errors import NetError


def bad(index, value):
    return ValueError(f"value {value:g} at {index}")


@pytest.fixture
def faults():
    words = np.array([0, 0, 0, 4096])
    return Faults(words, words.ctypes.data, lambda: None, lambda: None)


def find(faults, code, index, value):
    """As a kernel does."""
    faults.words[:2] = code, index
    faults.words[2:3].view(np.float64)[0] = value


def test_a_fault_is_raised_once(faults):
    code = faults.code("key", bad)
    assert code and faults.code("key", bad) == code != faults.code("other", bad)
    find(faults, code, 7, 2.5)
    with pytest.raises(ValueError, match="^value 2.5 at 7$"):
        faults.check()
    faults.check()


def test_what_is_queued_behind_does_not_find_it_again():
    words, cleared = np.array([0, 0, 0, 4096]), []
    faults = Faults(words, words.ctypes.data, lambda: find(faults, 1, 7, 2.5), lambda: cleared.append(1))
    find(faults, faults.code("key", bad), 7, 2.5)
    with pytest.raises(ValueError, match="at 7"):
        faults.check()
    faults.check()
    assert faults.flag == words[3] == 4096 and cleared == [1]


def test_the_layer_that_queued_it_is_named(faults):
    faults.layer = "loss1"
    one = faults.code("key", bad)
    faults.layer = "loss2"
    assert faults.code("key", bad) != one
    find(faults, one, 0, 1)
    with pytest.raises(NetError, match="^layer 'loss1': value 1 at 0$"):
        faults.check()
    named = faults.code("named", lambda index, value: NetError("layer 'loss2': label"))
    find(faults, named, 0, 1)
    with pytest.raises(NetError, match="^layer 'loss2': label$"):
        faults.check()


def test_threads_are_in_layers_of_their_own(faults):
    faults.layer = "mine"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(faults.layer))
    thread.start()
    thread.join()
    assert seen == [""] and faults.layer == "mine"


def test_a_finalizer_leaves_a_fault_to_whoever_waits_next(faults):
    find(faults, faults.code("key", bad), 7, 2.5)
    with faults.left():
        faults.check()
    with pytest.raises(ValueError, match="at 7"):
        faults.check()
