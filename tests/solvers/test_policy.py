"""Learning rates against formulas written out here, and the messages for what is missing."""

import math

import pytest

from blobmem.errors import NetError
from blobmem.proto.text import read_solver
from blobmem.solvers.policy import POLICIES, LearningRate

CASES = {
    "fixed": ("", lambda i: 0.2),
    "step": ("gamma: 0.5 stepsize: 7", lambda i: 0.2 * 0.5 ** (i // 7)),
    "exp": ("gamma: 0.95", lambda i: 0.2 * 0.95**i),
    "inv": ("gamma: 0.1 power: 0.75", lambda i: 0.2 / (1 + 0.1 * i) ** 0.75),
    "multistep": ("gamma: 0.3 stepvalue: 5 stepvalue: 12", lambda i: 0.2 * 0.3 ** ((i >= 5) + (i >= 12))),
    "poly": ("power: 1.5 max_iter: 30", lambda i: 0.2 * (1 - i / 30) ** 1.5),
    "sigmoid": ("gamma: 0.3 stepsize: 10", lambda i: 0.2 / (1 + math.exp(-0.3 * (i - 10)))),
}


def rate(policy, fields, source=""):
    return LearningRate(read_solver(f'lr_policy: "{policy}"\nbase_lr: 0.2\n{fields}'), source)


def test_every_policy_has_a_case():
    assert set(CASES) == set(POLICIES)


@pytest.mark.parametrize("policy", CASES)
def test_formula(policy):
    fields, formula = CASES[policy]
    learning_rate = rate(policy, fields)
    for iteration in range(30):
        assert learning_rate.at(iteration) == pytest.approx(formula(iteration), rel=1e-6)
        assert learning_rate.advance(iteration) == pytest.approx(formula(iteration), rel=1e-6)


def test_asking_for_a_rate_changes_nothing():
    learning_rate = rate("multistep", "gamma: 0.5 stepvalue: 3")
    assert learning_rate.at(5) == pytest.approx(0.1)
    assert learning_rate.current_step == 0
    learning_rate.advance(5)
    assert learning_rate.current_step == 1


def test_multistep_goes_on_from_a_restored_step_one_at_a_time():
    learning_rate = rate("multistep", "gamma: 0.1 stepvalue: 2 stepvalue: 2 stepvalue: 50")
    learning_rate.current_step = 0
    assert [learning_rate.advance(10) for _ in range(3)] == pytest.approx([0.02, 0.002, 0.002])


@pytest.mark.parametrize("policy, fields", CASES.items(), ids=CASES)
def test_no_iteration_breaks_a_policy(policy, fields):
    learning_rate = rate(policy, fields[0])
    for iteration in (10**6, 10**9):
        assert 0 <= learning_rate.at(iteration) < 0.2001


def test_overflow_is_infinite_as_in_c():
    assert rate("exp", "gamma: 2").at(10**5) == math.inf
    assert rate("sigmoid", "gamma: -5 stepsize: 1").at(10**6) == 0


@pytest.mark.parametrize(
    "policy, field",
    [(policy, name) for policy, entry in POLICIES.items() for name in entry.fields],
)
def test_missing_field_is_named(policy, field):
    fields = {f"{name}: 3" for name in ("gamma", "power", "stepsize", "stepvalue", "max_iter") if name != field}
    with pytest.raises(NetError, match=rf"solver\.prototxt: lr_policy '{policy}' needs {field}"):
        rate(policy, " ".join(fields), "solver.prototxt")


def test_missing_base_lr_is_named():
    with pytest.raises(NetError, match="needs base_lr"):
        LearningRate(read_solver('lr_policy: "fixed"\nmax_iter: 3'))


@pytest.mark.parametrize("text, got", [('lr_policy: "cosine"', "'cosine'"), ("max_iter: 3", "none")])
def test_unknown_policy_lists_the_known(text, got):
    with pytest.raises(NetError, match=f"expected one of fixed, step, exp, inv, multistep, poly, sigmoid; got {got}"):
        LearningRate(read_solver(f"base_lr: 1\n{text}"))


def test_stepsize_of_zero_is_refused():
    with pytest.raises(NetError, match="stepsize: expected 1 or more, got 0"):
        rate("step", "gamma: 0.5 stepsize: 0")
