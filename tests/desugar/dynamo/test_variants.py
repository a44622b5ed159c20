"""Programs for calls that Dynamo has not looked at: shared memory, and functions that differentiate others."""

from __future__ import annotations

import pytest
import torch

from desugar.backends.choose import choose_backend
from desugar.dynamo.variants import MAX_PROGRAMS, Specialized, facts_of, offsets_of
from tests.desugar.classes import EVERY, Labeled, Pair, TwoTensor, make
from tests.desugar.judge import assert_same_values, by_dynamo, by_pass


def specialized(fn):
    graph = torch.fx.symbolic_trace(lambda x: x)
    return Specialized(lambda leaves: (fn(*leaves),), choose_backend("eager"), "", graph, ())


@pytest.mark.parametrize("cls", EVERY)
def test_equal_calls_have_equal_facts(cls):
    one, same, wider, grad = (
        facts_of([make(cls, 2, size, grad=grad), 3, "text"])
        for size, grad in ((6, False), (6, False), (8, False), (6, True))
    )
    assert one == same and one.structure == wider.structure != grad.structure
    assert one.extents != wider.extents


A, B = torch.zeros(4), torch.zeros(4)
UNLIKE = [
    [Pair(A, B), Pair(torch.zeros(4), torch.zeros(4))],
    [Pair(A, B), Pair(A, torch.zeros(4))],
    [Pair(A, B), Pair(B, A)],
    [A[:3], A[1:]],
    [A[:3], A[:3]],
    [A[:3], B[1:]],
    [0.0],
    [-0.0],
    [1],
    [True],
]


def test_calls_that_differ_in_memory_or_constants_have_other_facts():
    assert len({facts_of(leaves).structure for leaves in UNLIKE}) == len(UNLIKE)
    assert offsets_of([A[2:], Pair(A[1:], B[3:])]) == (2, 1, 3)


def test_other_sizes_make_one_more_program():
    compiled = specialized(lambda x, y: x * y)
    for n in (3, 4, 5, 6):
        x, y = make(TwoTensor, n, 4), torch.randn(4)
        (got,) = compiled(x, y)
        assert_same_values([got], [x * y])
    assert len(compiled.entries) == 2


@pytest.mark.parametrize(
    ("fn", "make_x"),
    [
        (lambda x: x * 2 if x.shape[0] % 2 else x + 1, lambda n: torch.full((n,), 3.0)),
        (lambda x: x * 2 if x.count % 2 else x + 1, lambda n: Labeled(torch.full((3,), 3.0), count=n)),
    ],
)
def test_what_a_program_assumed_of_sizes_is_compared(fn, make_x):
    """No guard of Dynamo's does it for these calls."""
    compiled = specialized(fn)
    for n in (4, 6, 7, 9, 8, 5):
        assert_same_values(compiled(make_x(n)), [fn(make_x(n))])


def test_other_modes_make_other_programs():
    compiled, x = specialized(lambda x: x * 2), torch.ones(3, requires_grad=True)
    for around in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with around():
                (got,) = compiled(x)
            assert got.requires_grad == (around is torch.enable_grad)
    assert len(compiled.entries) == 3


@pytest.mark.slow
def test_beyond_the_limit_the_function_itself_runs():
    compiled = specialized(lambda x, n: x * n)
    for n in range(MAX_PROGRAMS + 2):
        assert compiled(torch.ones(2), n)[0][0] == n
    assert len(compiled.entries) == MAX_PROGRAMS


# ---- through both doors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [by_pass, by_dynamo])
def test_overlapping_arguments_that_require_grad_are_refused(way):
    base = TwoTensor(torch.arange(5.0), torch.arange(5.0)).requires_grad_() * 1
    compiled = way(lambda x, y: (x.mul_(2), y * 3)[1])
    with pytest.raises(RuntimeError, match="share memory, and one of them is changed in place"):
        compiled(base[:4], base[1:])
