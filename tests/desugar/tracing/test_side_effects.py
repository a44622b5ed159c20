"""Writes to tensors that repeat an element, random numbers, ops with an effect."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import desugar
from desugar import DesugarError
from tests.desugar.classes import Pair, Single, TwoTensor, make
from tests.desugar.judge import (
    BOTH_DOORS,
    assert_wrong_everywhere,
    by_dynamo,
    by_pass,
    judge,
    strictly,
    unlooked_at,
)

# ---- writes --------------------------------------------------------------------------------------------------


class Column(Single):
    """Holds a column of length 3 and shows it as a matrix of two equal ones; writes through an expanded view."""

    @staticmethod
    def __new__(cls, a):
        return torch.Tensor._make_wrapper_subclass(cls, (*a.shape, 2), dtype=a.dtype)

    def plain(self):
        return self.a.unsqueeze(-1).expand(*self.shape)

    @classmethod
    def wrap(cls, out):
        return out


def test_a_write_by_the_class_itself_is_refused():
    assert_wrong_everywhere(
        lambda x: x.zero_(), lambda: (Column(torch.ones(3)),), "writes to an expanded tensor"
    )


def test_reads_and_shapes_in_place_are_no_writes():
    judge(lambda x: x + 1, lambda: (Column(torch.arange(3.0)),))
    judge(lambda x: x.expand(2, 3).t_() + 1, lambda: (torch.arange(3.0),))


# ---- random numbers ------------------------------------------------------------------------------------------


def seeded_and_restored(x):
    state = torch.get_rng_state()
    torch.manual_seed(3)
    out = torch.nn.functional.dropout(x, 0.5)
    torch.set_rng_state(state)
    return out


SEEDED = {
    "seeded": lambda x: (torch.manual_seed(3), x + torch.rand(3))[1],
    "seeded and restored": seeded_and_restored,
    "seeded for others": lambda x: (torch.manual_seed(3), x + 1)[1],
    "from a fresh generator": lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(1)),
}
seeds = pytest.mark.parametrize("fn", SEEDED.values(), ids=SEEDED)


@pytest.mark.sweep(4)
@BOTH_DOORS
@pytest.mark.parametrize("cls", [Tensor, TwoTensor])
@seeds
def test_a_seed_inside(fn, cls, door):
    compiled = judge(fn, lambda: (make(cls, 3),), way=door, calls=3)
    x, states = make(cls, 3), []
    for function in (fn, compiled):
        torch.manual_seed(7)
        function(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.sweep(16)
@BOTH_DOORS
@seeds
def test_a_seed_where_dynamo_does_not_look_is_refused_or_right(fn, door):
    inside = unlooked_at(fn)
    compiled = door(lambda x: inside(x) * 1)
    for _ in range(3):
        with contextlib.suppress(DesugarError, torch._dynamo.exc.BackendCompilerFailed):
            judge(fn, lambda: (torch.ones(3),), compiled)


@BOTH_DOORS
def test_a_generator_from_outside(door):
    generator = torch.Generator().manual_seed(1)
    compiled = door(lambda x: x + torch.rand(3, generator=generator))
    got = [compiled(torch.ones(3)) for _ in range(3)]
    generator.manual_seed(1)
    assert all(torch.equal(one, torch.ones(3) + torch.rand(3, generator=generator)) for one in got)


def test_another_thread_that_draws_numbers_is_no_seed():
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(1)

    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(stop.set)
        pool.submit(draw)
        for size in range(1, 9):
            strictly(lambda x: torch.rand_like(x) + x)(torch.ones(size))


# ---- ops with an effect besides their result -----------------------------------------------------------------


def regular(grad=False):
    x = torch.arange(9.0, dtype=torch.float64).reshape(3, 3) / 10
    return (x @ x.T + torch.eye(3, dtype=torch.float64)).requires_grad_(grad)


def singular(grad=False):
    return torch.zeros(3, 3, dtype=torch.float64).requires_grad_(grad)


CHECKED = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x * 2),
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda x: torch.linalg.lu_factor(x)[0],
    "tensorinv": lambda x: torch.linalg.tensorinv(x.unsqueeze(1), ind=2),
    "two": lambda x: torch.linalg.inv(x) + torch.linalg.cholesky(x * 2),
    "on a subclass": lambda x: torch.linalg.inv(Pair(x, x * 2)).unwrap("b"),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", [by_pass, by_dynamo])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", CHECKED.values(), ids=CHECKED)
def test_linear_algebra_that_checks(fn, grad, way):
    judge(fn, lambda: (regular(grad),), way=way, calls=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", CHECKED.values(), ids=CHECKED)
def test_its_errors_are_eagers(fn, grad):
    compiled, errors = by_pass(fn), []
    compiled(regular(grad))
    for function in (fn, compiled):
        with pytest.raises(RuntimeError) as caught:
            function(singular(grad))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1] and len(compiled.programs) == 1


@pytest.mark.parametrize(
    "fn",
    [lambda x: torch.linalg.inv(x.add_(0)), lambda x: (torch.linalg.cholesky(x), x.add_(0) * 2)[1]],
    ids=["its argument", "a result that nobody uses"],
)
def test_an_argument_is_not_written_when_the_check_fails(fn):
    compiled, x = by_pass(fn), singular()
    compiled(regular())
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(x)
    assert torch.equal(x, singular())


@pytest.mark.slow
def test_through_inductor():
    compiled = desugar.compile(lambda x: torch.linalg.solve(x, x * 2) + torch.linalg.inv(x))
    judge(compiled.__wrapped__, lambda: (regular(True),), compiled)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(singular(True))


def test_in_a_backward_it_is_refused():
    fn = lambda x: torch.linalg.eigvals(x).abs()  # noqa: E731
    with pytest.raises(DesugarError, match="backward calls an op with a side effect") as caught:
        strictly(fn)(regular(True))
    assert __file__ in str(caught.value)
    judge(fn, lambda: (regular(True),))


told: list[str] = []


@torch.library.custom_op("desugar_tests::tell", mutates_args=())
def tell(x: torch.Tensor, what: str) -> torch.Tensor:
    told.append(what)
    return x.clone()


tell.register_fake(lambda x, what: torch.empty_like(x))


def test_custom_ops_keep_their_order():
    op = torch.ops.desugar_tests.tell.default
    _register_effectful_op(op, _EffectType.ORDERED)
    try:
        compiled = by_pass(lambda x: (tell(x, "first"), tell(x * 2, "second") + 1)[1])
        for _ in range(2):
            told.clear()
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
            assert told == ["first", "second"]
    finally:
        _register_effectful_op(op, None)
