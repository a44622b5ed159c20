"""Ops on lists, and rows that are repeated, reversed, rolled, cut with a step or into windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor

LENGTHS = [3, 0, 5, 2]
REPEATS = torch.tensor([2, 1, 0, 3])

Rows = list[Tensor]

# The op, and what a loop over the rows gives.
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Rows], Rows]]] = {
    "each row twice": (
        lambda x: x.repeat_interleave(2, 0),
        lambda rows: [row for row in rows for _ in range(2)],
    ),
    "rows by a tensor": (
        lambda x: x.repeat_interleave(REPEATS, 0),
        lambda rows: [row for row, n in zip(rows, REPEATS.tolist(), strict=True) for _ in range(n)],
    ),
    "rows by a number in a tensor": (
        lambda x: torch.repeat_interleave(x, torch.tensor([2]), dim=0),
        lambda rows: [row for row in rows for _ in range(2)],
    ),
    "entries": (
        lambda x: x.repeat_interleave(2, 1),
        lambda rows: [row.repeat_interleave(2, 0) for row in rows],
    ),
    "features by a tensor": (
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), -1),
        lambda rows: [row.repeat_interleave(torch.tensor([1, 0, 2]), -1) for row in rows],
    ),
    "repeat": (lambda x: x.repeat(2, 1, 2), lambda rows: [row.repeat(1, 2) for row in rows + rows]),
    "repeat entries": (lambda x: x.repeat(1, 3, 1), lambda rows: [row.repeat(3, 1) for row in rows]),
    "tile": (lambda x: torch.tile(x, (2, 1)), lambda rows: [row.tile(2, 1) for row in rows]),
    "flip": (lambda x: x.flip(0), lambda rows: rows[::-1]),
    "flip both": (lambda x: x.flip(0, 1), lambda rows: [row.flip(0) for row in rows[::-1]]),
    "roll": (lambda x: x.roll(1, 0), lambda rows: rows[-1:] + rows[:-1]),
    "roll backwards": (
        lambda x: x.roll((-1, 1), (0, 1)),
        lambda rows: [r.roll(1, 0) for r in rows[1:] + rows[:1]],
    ),
    "every other entry": (lambda x: x[:, ::2], lambda rows: [row[::2] for row in rows]),
    "a step from 1": (lambda x: x[:, 1::3], lambda rows: [row[1::3] for row in rows]),
    "a step up to the end": (lambda x: x[:, :-1:2], lambda rows: [row[:-1:2] for row in rows]),
    "a step from the end": (lambda x: x[:, -4::2], lambda rows: [row[-4::2] for row in rows]),
    "windows": (
        lambda x: x.unfold(1, 2, 2),
        lambda rows: [row.unfold(0, 2, 2) if len(row) > 1 else row.new_zeros(0, 3, 2) for row in rows],
    ),
    "windows of features": (lambda x: x.unfold(2, 2, 1), lambda rows: [row.unfold(1, 2, 1) for row in rows]),
}


def make(layout: str) -> tuple[Any, Rows]:
    """The rows of a layout, which require grad, and the same to loop over."""
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in LENGTHS]
    if layout == "padded":
        x: Any = PaddedTensor.from_tensors(rows, multiple=4)
    elif layout == "holes":
        x = JaggedTensor.from_tensors(
            [torch.full((1, 3), torch.nan, dtype=torch.float64).expand(1, 3), *rows]
        )[1:]
        x = JaggedTensor(x.values, x.offsets, lengths=x.row_lengths())
    else:
        x = JaggedTensor.from_tensors(rows)
    return x.detach().requires_grad_(), [row.requires_grad_() for row in rows]


def check(op: Callable[[Any], Any], loop: Callable[[Rows], Rows], layout: str) -> None:
    """Values and gradients are those of a loop."""
    x, rows = make(layout)
    result, expected = op(x), loop(rows)
    assert type(result) is type(x)
    found = result.to_tensors() if not torch.compiler.is_compiling() else []
    torch.testing.assert_close(found, expected)
    result.square().sum().backward()
    sum(row.square().sum() for row in expected).backward()  # type: ignore[union-attr]
    for got, row in zip(x.grad.to_tensors(), rows, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(row) if row.grad is None else row.grad)


@pytest.mark.parametrize("layout", ["back to back", "holes", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_as_a_loop_over_the_rows(name, layout):
    check(*CASES[name], layout)


@pytest.mark.sweep(36)
@pytest.mark.parametrize("layout", ["back to back", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_compiled(name, layout):
    op, loop = CASES[name]
    check(desugar.compile(op, backend="eager"), loop, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows by a tensor", "every other entry"])
def test_under_stock_in_one_graph(name):
    op, loop = CASES[name]
    check(torch.compile(op, backend="aot_eager", fullgraph=True), loop, "back to back")


@pytest.mark.parametrize("layout", ["back to back", "padded"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.repeat_interleave(2), r"repeat_interleave: without dim="),
        (lambda x: x.repeat_interleave(REPEATS, 1), r"repeat_interleave: expected an int of repeats"),
        (lambda x: x.unfold(0, 2, 1), r"unfold: "),
        (lambda x: x.repeat(2, 1), r"repeat: expected a number for each dimension"),
        (lambda x: x[:, ::-1], r"indexing .*positive step"),
    ],
)
def test_without_a_meaning(layout, call, message):
    with pytest.raises(DispatchError, match=message):
        call(make(layout)[0])


# ---- ops on lists ----------------------------------------------------------------------------------------------


LISTS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: torch._foreach_add([x, x], 1),
    "add, of two lists": lambda x: torch._foreach_add([x, x], [x, 2 * x], alpha=3),
    "mul, by numbers": lambda x: torch._foreach_mul([x, x], [2.0, 3.0]),
    "mul, by a tensor": lambda x: torch._foreach_mul([x, x], torch.tensor(2.0)),
    "exp": lambda x: torch._foreach_exp([x, x]),
    "pow": lambda x: torch._foreach_pow(2.0, [x, x]),
    "lerp": lambda x: torch._foreach_lerp([x], [x * x], 0.25),
    "addcmul": lambda x: torch._foreach_addcmul([x, x], [x, x], [x, x], [0.5, 2.0]),
    "addcdiv": lambda x: torch._foreach_addcdiv([x], [x], [x * x + 1], [3.0]),
    "clamp_max": lambda x: torch._foreach_clamp_max([x], 0.5),
    "norm": lambda x: torch._foreach_norm([x, 2 * x], 1),
    "beside a plain tensor": lambda x: torch._foreach_add([x, torch.ones(2, dtype=torch.float64)], 1),
}


def numbers(results: Any) -> list[Tensor]:
    """The elements of all results."""
    return [t.values if isinstance(t, JaggedTensor) else t for t in results]


@pytest.mark.parametrize("name", LISTS)
def test_lists(name):
    x, _ = make("back to back")
    plain = x.values.detach().requires_grad_()
    found, expected = LISTS[name](x), LISTS[name](plain)
    assert type(found) is type(expected)
    torch.testing.assert_close(numbers(found), list(expected))
    sum(t.sum() for t in found).backward()
    sum(t.sum() for t in expected).backward()
    torch.testing.assert_close(x.grad.values, plain.grad)


def test_lists_in_place():
    x, _ = make("back to back")
    x = x.detach()
    given = [x.clone(), x.clone()]
    assert torch._foreach_add_(given, [x, x]) is given
    torch._foreach_maximum_(given, 0.5)
    torch.testing.assert_close([t.values for t in given], [(x.values * 2).clamp(min=0.5)] * 2)
    torch._foreach_copy_(given, [x, 3 * x])
    torch._foreach_zero_(given[:1])
    torch.testing.assert_close([t.values for t in given], [x.values * 0, x.values * 3])


def test_lists_of_other_rows():
    x, y = (JaggedTensor.from_tensors([torch.ones(n)]) for n in (2, 3))
    with pytest.raises(ValueError, match="same length"):
        torch._foreach_add([x], [y])
    with pytest.raises(RuntimeError, match="lists of one length"):
        torch._foreach_add([x], [x, x])


def test_compiled_lists():
    x, _ = make("back to back")

    def both(x: Any) -> Any:
        a, b = torch._foreach_mul([x, x], 2.0)
        return (a * b).sum()

    torch.testing.assert_close(desugar.compile(both, backend="eager")(x), both(x))
    torch.testing.assert_close(torch.compile(both, backend="aot_eager", fullgraph=True)(x), both(x))
