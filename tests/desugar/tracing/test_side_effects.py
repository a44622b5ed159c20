"""Writes to tensors that stand for one element several times, and random numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from desugar import DesugarError
from tests.desugar.classes import Single, TwoTensor, make
from tests.desugar.idioms.running import DOORS
from tests.desugar.judge import by_pass, judge
from tests.desugar.refusing import assert_wrong_everywhere, strictly, unlooked_at

EVERY_DOOR = pytest.mark.parametrize("door", [strictly, DOORS["torch.compile"]])

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


def test_reading_is_not():
    judge(lambda x: x + 1, lambda: (Column(torch.arange(3.0)),))


def test_shapes_in_place_are_not_writes():
    judge(lambda x: x.expand(2, 3).t_() + 1, lambda: (torch.arange(3.0),))


# ---- random numbers ------------------------------------------------------------------------------------------


def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(3)


def seeded_and_restored(x):
    state = torch.get_rng_state()
    torch.manual_seed(3)
    out = torch.nn.functional.dropout(x, 0.5)
    torch.set_rng_state(state)
    return out


def seeded_for_others(x):
    torch.manual_seed(3)
    return x + 1


def drawn_from_a_fresh_generator(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(1))


SEEDED = [seeded, seeded_and_restored, seeded_for_others, drawn_from_a_fresh_generator]


@pytest.mark.sweep(4)
@EVERY_DOOR
@pytest.mark.parametrize("cls", [Tensor, TwoTensor])
@pytest.mark.parametrize("fn", SEEDED)
def test_a_seed_inside(fn, cls, door):
    compiled = judge(fn, lambda: (make(cls, 3),), way=door, calls=3)
    x, states = make(cls, 3), []
    for function in (fn, compiled):
        torch.manual_seed(7)
        function(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.sweep(8)
@EVERY_DOOR
@pytest.mark.parametrize("fn", SEEDED)
def test_a_seed_where_dynamo_does_not_look_is_refused_or_right(fn, door):
    inside = unlooked_at(fn)
    compiled, state = door(lambda x: inside(x) * 1), torch.get_rng_state()
    for _ in range(3):
        torch.set_rng_state(state)
        want = fn(torch.ones(3))
        torch.set_rng_state(state)
        try:
            got = compiled(torch.ones(3))
        except (DesugarError, torch._dynamo.exc.BackendCompilerFailed):
            continue
        assert torch.equal(got, want)


@EVERY_DOOR
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

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for size in range(1, 9):
            by_pass(lambda x: torch.rand_like(x) + x, strict=True)(torch.ones(size))
    finally:
        stop.set()
        thread.join()
