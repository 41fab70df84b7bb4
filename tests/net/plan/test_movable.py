"""Which updates of evicted state may run elsewhere in backward, and what goes with them."""

from plan_nets import draft_of

from blobmem import Blob, SimulatedDevice
from blobmem.net.plan.movable import Update, movable
from blobmem.ops.call import call, overwrite, read, write

DEVICE = SimulatedDevice()


def array(name):
    return Blob((256,), device=DEVICE, name=name)


class State:
    """Some bytes of state, and the array in which they come and go."""

    def __init__(self, name, start=0, home=None):
        self.array, self.home = array(name), home or array(name).data_view.memory
        self._where = {"home": self.home, "start": start, "sums": False}

    def fetch(self):
        return call("fetch", overwrite(self.array), **self._where)

    def evict(self):
        return call("evict", read(self.array), **self._where)


def a_pass(*, made_by="conv_backward_weights", before=(), shared=False, behind=()):
    """Backward in which a gradient is made, and a parameter updated by it, which comes and goes with its history.

    What others do `before` that or `behind`, they make of the parameter and the gradient; it is `shared` if another
    call has it brought.
    """
    x, gradient, data, history = array("x"), array("gradient"), State("data"), State("history")
    fetched = [data.fetch()]
    return draft_of(
        [call("make", overwrite(x))],
        [
            *(make(data, gradient) for make in before),
            *([*fetched, call("conv_backward_data", read(data.array))] if shared else ()),
            call(made_by, read(x), overwrite(gradient)),
            *(() if shared else fetched),
            history.fetch(),
            call("sgd_update", read(gradient), write(data.array), write(history.array)),
            data.evict(),
            history.evict(),
            *(make(data, gradient) for make in behind),
        ],
    )


def test_an_update_moves_with_what_comes_and_goes_for_it():
    """Not before its gradient is made; steps count from the first of forward on."""
    assert movable(a_pass()) == [Update(4, [2, 3], [5, 6], 2)]


def test_what_makes_a_gradient_for_it_alone_moves_too():
    assert movable(a_pass(made_by="inner_product_backward_weights")) == [Update(4, [2, 3], [1, 5, 6], 1)]


def test_it_runs_behind_who_reads_what_it_changes():
    """In the same array, which it then does not bring itself, or in another one, as that was before."""
    assert movable(a_pass(shared=True)) == [Update(5, [4], [6, 7], 4)]
    found = movable(a_pass(before=[lambda data, _: State("again", home=data.home).fetch()]))
    assert [each.least for each in found] == [3]


def test_what_is_wanted_after_it_stays():
    """Who brings later what it has changed, or makes the gradient anew."""
    assert movable(a_pass(behind=[lambda _, gradient: call("make", overwrite(gradient))])) == []
    assert movable(a_pass(behind=[lambda data, _: State("again", home=data.home).fetch()])) == []
    other = State("other").home
    assert len(movable(a_pass(behind=[lambda *_: State("more", home=other).fetch()]))) == 1


def test_an_update_of_what_is_always_there_stays():
    gradient, data = array("gradient"), array("data")
    backward = [call("make", overwrite(gradient)), call("sgd_update", read(gradient), write(data))]
    assert movable(draft_of([], backward)) == []
