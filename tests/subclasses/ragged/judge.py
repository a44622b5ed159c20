"""A loop over the rows as the judge of ragged tensors, for jagged batches and padded tables.

A `Batch` has one leaf, of which both the ragged tensor and the plain rows are functions. Memory between rows, and the
padding of a table, holds NaN or an index out of range, so that a wrong read shows. The cotangent of a padded result is
NaN there too.

`check_parts` compares values, and then the gradients of the leaf and of all dense parameters under one random
cotangent. `judged` and `refused` make tests of tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import by_desugar as desugared, by_stock, eager

JAGGED = ["back to back", "holes", "ragged dim 2", "not contiguous"]
PLACES = {"[B, T]": (0, 1), "[T, B]": (1, 0), "[B, D, T]": (0, 2), "[D, B, T]": (1, 2)}
LAYOUTS = ["back to back", "holes", "padded"]
EVERY = [*JAGGED, *PLACES]
LENGTHS = [3, 0, 5, 1]


def stock(f: Callable[..., Any]) -> Callable[..., Any]:
    """Under stock `torch.compile`."""
    return by_stock(f, fullgraph=True)


WAYS = [eager, stock, desugared]

layouts = pytest.mark.parametrize("layout", LAYOUTS)
ways = pytest.mark.parametrize("way", WAYS)
two_ways = pytest.mark.parametrize("way", [eager, desugared])
classes = pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])

# ---- batches ---------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows as a ragged tensor, and as plain slices of the same leaf."""

    leaf: Tensor
    offsets: Tensor
    lengths: Tensor | None
    ragged_dim: int
    max_length: int
    batch_dim: int = 0
    count: Tensor | None = None

    @property
    def x(self) -> JaggedTensor:
        """The rows as one ragged tensor."""
        return JaggedTensor(
            self.leaf,
            self.offsets,
            lengths=self.lengths,
            count=self.count,
            ragged_dim=self.ragged_dim,
            max_length=self.max_length,
        )

    @property
    def rows(self) -> list[Tensor]:
        """The rows by plain slicing."""
        lengths = self.offsets.diff() if self.lengths is None else self.lengths
        pairs = zip(self.offsets.tolist(), lengths[: self.count].tolist(), strict=False)
        return [self.leaf.narrow(self.ragged_dim - 1, start, n) for start, n in pairs]


def make_batch(
    layout: str = "back to back",
    lengths: Sequence[int] = LENGTHS,
    entry: Sequence[int] = (4,),
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Random rows ``[length, *entry]``; with ragged dim 2 they are ``[entry[0], length, *entry[1:]]``."""
    spare = [2, 1, 0] if layout == "counted" else []
    sizes = torch.tensor([*lengths, *spare], dtype=torch.int64)
    gaps = torch.arange(len(sizes)) % 2 + 1 if layout == "holes" else 0
    offsets = F.pad((sizes + gaps).cumsum(0), (1, 0))
    shape = (int(offsets[-1]), *entry)
    values = torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 9, shape)
    if layout == "not contiguous":
        values = torch.cat([values, values], -1)[..., : entry[-1]]
    if layout == "ragged dim 2":
        values = values.movedim(0, 1).contiguous()
    if layout == "holes" and dtype.is_floating_point:
        for end, gap in zip(offsets[1:].tolist(), gaps.tolist(), strict=True):
            values[end - gap : end] = float("nan")
    if dtype.is_floating_point:
        values[values.shape[0] - sum(spare) :] = float("nan")
    leaf = values.to(dtype).requires_grad_(dtype.is_floating_point)
    place = 2 if layout == "ragged dim 2" else 1
    rows = offsets, sizes if layout == "holes" else None, place, max([*lengths, *spare], default=0)
    return Batch(leaf, *rows, count=torch.tensor(len(lengths)) if spare else None)


@dataclass
class Table:
    """Rows as a padded tensor, and as plain slices of the same leaf."""

    leaf: Tensor
    lengths: Tensor
    batch_dim: int = 0
    ragged_dim: int = 1

    @property
    def x(self) -> PaddedTensor:
        """The rows as one padded tensor."""
        return PaddedTensor(self.leaf, self.lengths, ragged_dim=self.ragged_dim, batch_dim=self.batch_dim)

    @property
    def rows(self) -> list[Tensor]:
        """The rows by plain slicing, without the batch dimension."""
        return slices_of(self.leaf, self.lengths, self.batch_dim, self.ragged_dim)


def slices_of(table: Tensor, lengths: Tensor, batch_dim: int, ragged_dim: int) -> list[Tensor]:
    """Rows of a plain table by plain slicing; merged dimensions hold their rows one after another."""
    if batch_dim == ragged_dim:
        table, ragged_dim = table.unflatten(batch_dim, (len(lengths), -1)), batch_dim + 1
    place = ragged_dim - (batch_dim < ragged_dim)
    pairs = zip(table.unbind(batch_dim), lengths.tolist(), strict=True)
    return [row.narrow(place, 0, n) for row, n in pairs]


def make_table(
    places: str = "[B, T]", lengths: Sequence[int] = LENGTHS, width: int = 7, entry: Sequence[int] = (4,)
) -> Table:
    """Random rows whose padding is NaN."""
    table = torch.randn(len(lengths), width, *entry, dtype=torch.float64)
    for row, n in zip(table, lengths, strict=True):
        row[n:] = float("nan")
    leaf = table.movedim((0, 1), PLACES[places]).contiguous().requires_grad_()
    return Table(leaf, torch.tensor(lengths), *PLACES[places])


def make(
    layout: str, lengths: Sequence[int] = LENGTHS, entry: Sequence[int] = (4,), width: int | None = None
) -> Any:
    """A batch or a table of random rows, the table by the name of its places; the padding is NaN."""
    places = "[B, T]" if layout == "padded" else layout
    if places in PLACES:
        return make_table(places, lengths, max(7, *lengths, 0) if width is None else width, entry)
    return make_batch(layout, lengths, entry)


def hold(layout: str, rows: Sequence[Tensor]) -> Any:
    """A value of these rows; the padding is NaN, or an index out of range."""
    batch = make(layout, [len(row) for row in rows], rows[0].shape[1:])
    nothing = float("nan") if rows[0].is_floating_point() else 10**9
    x, stored = batch.x.detach(), torch.full(batch.leaf.shape, nothing, dtype=rows[0].dtype)
    made = x.with_values(stored) if isinstance(x, JaggedTensor) else x.with_padded(stored)
    for mine, row in zip(made.to_tensors(), rows, strict=True):
        mine.copy_(row)
    return made


def with_gaps(rows: Sequence[Tensor]) -> Tensor:
    """A table of rows, as a function of them, with poison behind each: NaN, or an index out of range."""
    poison = float("nan") if rows[0].is_floating_point() else 10**9
    longer = [*rows, rows[0].new_zeros(max(map(len, rows)) + 2, *rows[0].shape[1:])]
    return torch.nn.utils.rnn.pad_sequence(longer, True, poison)[:-1]


def with_holes(rows: Sequence[Tensor]) -> JaggedTensor:
    """The rows with poison between them."""
    table, lengths = with_gaps(rows), torch.tensor([len(row) for row in rows])
    starts = torch.arange(len(rows) + 1) * table.shape[1]
    return JaggedTensor(table.flatten(0, 1), starts, lengths=lengths)


# How a value is made of rows, as a differentiable function of them.
KINDS: dict[str, Callable[[Any], Any]] = {
    "jagged": JaggedTensor.from_tensors,
    "holes": with_holes,
    "padded": lambda rows: PaddedTensor(with_gaps(rows), torch.tensor([len(row) for row in rows])),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def random(*shape: int) -> Tensor:
    """A parameter."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def numbers_of(x: Any) -> list[Any]:
    """The entries of each row as numbers."""
    return [row.tolist() for row in x.to_tensors()]


def row_dim(batch: Any) -> int:
    """The ragged dimension, in a row."""
    return batch.ragged_dim - (batch.batch_dim < batch.ragged_dim)


# ---- judging ---------------------------------------------------------------------------------------------------


def check_parts(
    batch: Any, got: Any, expected: Sequence[Tensor], parameters: Sequence[Any] = (), **tolerance: Any
) -> None:
    """Compares a result, or its parts, one by one, and the gradients that flow back from them."""
    if isinstance(got, JaggedTensor):
        assert got.max_length >= max(got.row_lengths().tolist(), default=0)
    batches = [b for b in (batch, *parameters) if not isinstance(b, Tensor)]
    leaves = [b.leaf for b in batches] + [t for t in parameters if isinstance(t, Tensor)]
    recorded = [t for t in leaves if t.requires_grad] if any(p.requires_grad for p in expected) else []
    holes = [b.leaf for b in batches if isinstance(b, Batch) and (b.lengths, b.count) != (None, None)]
    check_leaves(got, expected, recorded, holes, **tolerance)


def check_leaves(
    got: Any,
    expected: Sequence[Tensor],
    leaves: Sequence[Tensor],
    holes: Sequence[Tensor] = (),
    **tolerance: Any,
) -> None:
    """Compares the rows of a result, or its parts, and the gradients of leaves that flow back from them.

    Gradients do not count where a leaf with holes is NaN.
    """
    outputs = got.to_tensors() if isinstance(got, JaggedTensor | PaddedTensor) else list(got)
    if len(outputs) == 1 < len(expected):  # a result with an entry for each row that exists
        outputs = list(outputs[0])
    torch.testing.assert_close(outputs, list(expected), equal_nan=True, **tolerance)
    if not leaves:
        return
    cotangents = [torch.randn_like(p) for p in expected]
    theirs = grads_of(expected, leaves, cotangents)
    if isinstance(got, PaddedTensor):
        poisoned = torch.full_like(got.padded, float("nan"))
        parts = slices_of(poisoned, got.lengths, got.batch_dim, got.ragged_dim)
        for part, cotangent in zip(parts, cotangents, strict=False):
            part.copy_(cotangent)
        outputs, cotangents = [got], [got.detach().with_padded(poisoned)]
    for leaf, mine, wanted in zip(leaves, grads_of(outputs, leaves, cotangents), theirs, strict=True):
        assert type(mine) is Tensor and mine.shape == leaf.shape
        mine = torch.where(leaf.isnan(), 0, mine) if any(leaf is each for each in holes) else mine
        torch.testing.assert_close(mine, wanted, equal_nan=True, **tolerance)


def grads_of(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
    """The gradients of leaves by those outputs that require grad."""
    pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if t.requires_grad]
    outs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, leaves, given, allow_unused=True, materialize_grads=True)


def judge_rows(  # noqa: PLR0913
    layout: str,
    on_ragged: Callable[..., Any],
    on_row: Callable[..., Any],
    parameters: Sequence[Any] = (),
    lengths: Sequence[int] = LENGTHS,
    entry: Sequence[int] = (4,),
    way: Callable[..., Any] = eager,
    width: int | None = None,
    whole: bool = False,
    by_rows: bool = False,
    **tolerance: Any,
) -> Any:
    """Values and gradients of ``on_ragged(x, *parameters)``, by ``on_row(row, number, *parameters)``.

    With ``whole``, the judge is ``on_row(entries, *parameters)``, of all entries as one plain tensor. With ``by_rows``,
    it is ``on_row(rows, *parameters)``, which gives all parts of the result. A parameter may be another batch; its rows
    are given to the judge.
    """
    batch = make(layout, lengths, entry, width)
    got = way(on_ragged)(batch.x, *(p if isinstance(p, Tensor) else p.x for p in parameters))
    if by_rows:
        assert type(got) in (list, tuple, Tensor, type(batch.x))
        expected = on_row(batch.rows, *(p if isinstance(p, Tensor) else p.rows for p in parameters))
        check_parts(batch, got, expected, parameters, **tolerance)
    elif whole:
        expected = [on_row(torch.cat(batch.rows, row_dim(batch)), *parameters)]
        check_parts(batch, [got], expected, parameters, **tolerance)
    else:
        expected = [on_row(row, i, *parameters) for i, row in enumerate(batch.rows)]
        check_parts(batch, got, expected, parameters, **tolerance)
    return got


# ---- tests of tables -------------------------------------------------------------------------------------------

Pairs = Iterable[tuple[str, Callable[..., Any]]]


def pairs_of(layouts: Iterable[str] = LAYOUTS, ways: Iterable[Callable[..., Any]] = (eager,)) -> list[Any]:
    """Each layout with each way."""
    return list(itertools.product(layouts, ways))


IN_EAGER_MODE = pairs_of()


def judged(cases: Mapping[str, Any], pairs: Pairs = IN_EAGER_MODE, sweep: int = 1, **options: Any) -> Any:
    """A test of ``(on_ragged, on_row, *parameters)`` by `judge_rows`, in pairs of a layout and a way.

    A parameter is a tensor, the size of a random one, or a function of the layout that makes another batch.
    """

    @pytest.mark.sweep(sweep)
    @pytest.mark.parametrize(("layout", "way"), pairs)
    @pytest.mark.parametrize("name", cases)
    def test(name, layout, way):
        on_ragged, on_row, *parameters = cases[name]
        given = [p if isinstance(p, Tensor) else p(layout) if callable(p) else random(*p) for p in parameters]
        judge_rows(layout, on_ragged, on_row, given, way=way, **options)

    return test


judged_by_rows = functools.partial(judged, by_rows=True)


def along(f: Callable[[Any, int], Any], dim: int = 1) -> tuple[Callable[..., Any], ...]:
    """A function of a dimension, along this one of the batch, and along the same one of a row."""
    return (lambda x: f(x, dim)), (lambda row, _: f(row, dim - (dim > 0)))


def alike(f: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """A function that means the same of a batch and of a row."""
    return f, lambda row, _, *parameters: f(row, *parameters)


def refused(cases: Mapping[str, Any], layouts: Iterable[str] = LAYOUTS, **options: Any) -> Any:
    """A test of ``(call, error, words)``: a call with a value of a layout raises, and changes nothing of it."""

    @pytest.mark.parametrize("layout", layouts)
    @pytest.mark.parametrize("name", cases)
    def test(name, layout):
        call, error, words = cases[name]
        x = make(layout, **options).x.detach()
        before = x.clone()
        with pytest.raises(error, match=words):
            call(x)
        torch.testing.assert_close(x.unwrap(), before.unwrap(), equal_nan=True)

    return test


def in_parts(value: Any) -> Any:
    """A value with the rows of ragged tensors in their place."""
    if isinstance(value, JaggedTensor | PaddedTensor):
        return value.to_tensors()
    return [in_parts(part) for part in value] if isinstance(value, tuple | list) else value


def same(cases: Mapping[str, Callable[..., Any]], *arguments: Any, tolerance: float | None = None) -> Any:
    """A test of calls that give two values: both have the same rows, numbers and so on.

    With arguments, such as layouts, each call is tried with each of them.
    """

    @pytest.mark.parametrize("argument", arguments or [None])
    @pytest.mark.parametrize("name", cases)
    def test(name, argument):
        got, expected = map(in_parts, cases[name](*[argument] * bool(arguments)))
        torch.testing.assert_close(got, expected, equal_nan=True, atol=tolerance, rtol=tolerance)

    return test


def working(cases: Mapping[str, Callable[[], Any]]) -> Any:
    """A test that calls raise nothing."""

    @pytest.mark.parametrize("name", cases)
    def test(name):
        cases[name]()

    return test
