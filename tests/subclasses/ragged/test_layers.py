"""The rules that layers and losses of classes have in both layouts, with a loop over the rows as judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor

LENGTHS = [2, 0, 3]


def with_gaps(rows: list[Tensor]) -> Tensor:
    """A table of the rows with poison behind each: NaN, or an index that is none."""
    poison = torch.nan if rows[0].is_floating_point() else 10**9
    return torch.nn.utils.rnn.pad_sequence([*rows, rows[0].new_zeros(5, *rows[0].shape[1:])], True, poison)[
        :-1
    ]


def holes(rows: list[Tensor]) -> JaggedTensor:
    table, lengths = with_gaps(rows), torch.tensor([len(row) for row in rows])
    starts = torch.arange(len(rows) + 1) * table.shape[1]
    return JaggedTensor(table.flatten(0, 1), starts, lengths=lengths)


KINDS = {
    "jagged": JaggedTensor.from_tensors,
    "holes": holes,
    "padded": lambda rows: PaddedTensor(with_gaps(rows), torch.tensor([len(row) for row in rows])),
}
WAYS = {"eager": lambda f: f, "desugar": lambda f: desugar.compile(f, backend="eager")}
kinds = pytest.mark.parametrize("kind", KINDS)
ways = pytest.mark.parametrize("way", WAYS)


def rows_of(*entry: int) -> list[Tensor]:
    return [torch.randn(n, *entry, dtype=torch.float64, requires_grad=True) for n in LENGTHS]


def check(got: Any, expected: list[Tensor], leaves: list[Tensor]) -> None:
    """Compares what came out row by row, and then the gradients of all leaves."""
    parts = [got] if type(got) is Tensor else got.to_tensors()
    torch.testing.assert_close(parts, expected)
    cotangents = [torch.randn_like(part) for part in expected]
    torch.testing.assert_close(
        *(torch.autograd.grad(each, leaves, cotangents, allow_unused=True) for each in (parts, expected))
    )


# ---- products --------------------------------------------------------------------------------------------------


@pytest.mark.sweep(6)
@kinds
@ways
def test_a_product_with_a_vector(kind, way):
    rows, vector = rows_of(4), torch.randn(4, dtype=torch.float64, requires_grad=True)
    got = WAYS[way](lambda x, v: x @ v)(KINDS[kind](rows), vector)
    check(got, [row @ vector for row in rows], [*rows, vector])
    heads = rows_of(2, 4)
    got = WAYS[way](lambda x, v: torch.matmul(x.transpose(1, 2), v))(KINDS[kind](heads), vector)
    check(got.transpose(1, 2), [row @ vector for row in heads], [*heads, vector])


@kinds
def test_products_along_the_rows_are_refused(kind):
    x = KINDS[kind](rows_of(4))
    for f in (
        lambda: x.mT @ torch.ones(x.shape[1], dtype=torch.float64),
        lambda: torch.ones(5, 3, dtype=torch.float64) @ x[..., 0],
        lambda: torch.ones(3, dtype=torch.float64) @ x[..., 0],
    ):
        with pytest.raises(DispatchError, match="matmul"):
            f()


# ---- layers ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@kinds
@ways
def test_a_linear_layer_of_one_feature(kind, way):
    rows, weight = rows_of(4), torch.randn(4, dtype=torch.float64, requires_grad=True)
    got = WAYS[way](F.linear)(KINDS[kind](rows), weight)
    check(got, [F.linear(row, weight) for row in rows], [*rows, weight])


@kinds
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_look_at_all_indices(kind, options):
    rows = [torch.randint(0, 5, (n,)) for n in LENGTHS]
    weights = [torch.randn(5, 3, dtype=torch.float64) for _ in "xy"]
    weights[1].copy_(weights[0])
    x = KINDS[kind](rows)
    if kind != "jagged":
        with pytest.raises(DispatchError, match=r"embedding: max_norm.*from_tensors"):
            F.embedding(x, weights[0], **options)
        x = JaggedTensor.from_tensors(x.to_tensors())
    leaves = [w.requires_grad_() for w in weights]
    got = F.embedding(x, leaves[0], **options).unwrap("values")
    expected = F.embedding(torch.cat(rows), leaves[1], **options)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(t.square().sum(), w) for t, w in zip((got, expected), leaves, strict=True))
    )


@kinds
@pytest.mark.parametrize("layer", [F.linear, F.layer_norm, F.rms_norm, F.embedding], ids=lambda f: f.__name__)
def test_ragged_parameters_are_refused(kind, layer):
    x = KINDS[kind](rows_of(4))
    dense = torch.ones(3, 4, dtype=torch.float64)
    arguments = {F.embedding: (dense.long(), x), F.linear: (dense, x)}.get(layer, (dense, (4,), x))
    with pytest.raises(DispatchError, match=rf"{layer.__name__}: expected dense parameters"):
        layer(*arguments)


@kinds
def test_dropout_keeps_what_does_not_exist_apart(kind):
    rows = [torch.ones(n, 50, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    got = F.dropout(KINDS[kind](rows), 0.5)
    grads = torch.autograd.grad(got.sum(), rows)
    for row, part, grad in zip(rows, got.to_tensors(), grads, strict=True):
        assert (
            torch.equal(part, grad) and set(part.unique().tolist()) <= {0.0, 2.0} and part.shape == row.shape
        )


# ---- losses of classes -----------------------------------------------------------------------------------------


def loss_of(loss: Any, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return loss(logits.log_softmax(1) if loss is F.nll_loss else logits, target, **options)


@pytest.mark.sweep(3)
@kinds
@ways
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}, {"weight": True}], ids=str)
def test_losses_of_classes(kind, way, loss, reduction, options):
    if way != "eager" and options:
        pytest.skip("as in eager mode")
    if "weight" in options:
        options = {"weight": torch.rand(4, dtype=torch.float64)}
    rows, targets = rows_of(4), [torch.randint(0, 4, (n,)) for n in LENGTHS]
    options |= {"reduction": reduction}

    def merged(x, y):
        return loss_of(loss, x.flatten(0, 1), y.flatten(0, 1), **options)

    def transposed(x, y):
        return loss_of(loss, x.transpose(1, 2), y, **options)

    for f in (merged, transposed):
        got = WAYS[way](f)(KINDS[kind](rows), KINDS[kind](targets))
        if reduction == "none":
            expected = [loss_of(loss, row, t, **options) for row, t in zip(rows, targets, strict=True)]
        else:
            expected = [loss_of(loss, torch.cat(rows), torch.cat(targets), **options)]
        check(got, expected, rows)


@kinds
@pytest.mark.parametrize("probabilities", [False, True])
def test_a_dense_target(kind, probabilities):
    rows = rows_of(4)
    x = KINDS[kind](rows)
    size = (*x.shape[:2], 4) if probabilities else x.shape[:2]
    dense = torch.rand(size, dtype=torch.float64) if probabilities else torch.randint(0, 4, size)
    target = dense.transpose(1, 2) if probabilities else dense
    targets = [t[: len(row)] for t, row in zip(dense, rows, strict=True)]
    expected = F.cross_entropy(torch.cat(rows), torch.cat(targets))
    check(F.cross_entropy(x.transpose(1, 2), target), [expected], rows)


@kinds
def test_a_target_that_lies_otherwise(kind):
    rows, targets = rows_of(4), [torch.randint(0, 4, (n,)) for n in LENGTHS]
    wider = JaggedTensor.from_tensors(targets) if kind == "holes" else holes(targets)
    wider = PaddedTensor.from_tensors(targets, multiple=8) if kind == "padded" else wider
    expected = F.cross_entropy(torch.cat(rows), torch.cat(targets))
    check(F.cross_entropy(KINDS[kind](rows).transpose(1, 2), wider), [expected], rows)


@kinds
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss], ids=lambda f: f.__name__)
def test_what_does_not_fit(kind, loss):
    x, y = KINDS[kind](rows_of(4)), KINDS[kind]([torch.randint(0, 4, (n,)) for n in LENGTHS])
    other = KINDS[kind]([torch.zeros(n, dtype=torch.int64) for n in (3, 2, 0)])
    for arguments, error, words in (
        ((x, y), DispatchError, r"transpose\(1, 2\)"),
        ((torch.ones(5, 4), y.flatten(0, 1)), DispatchError, "expected ragged logits"),
        ((x.transpose(1, 2), y.flatten(0, 1)), DispatchError, "do not fit together"),
        ((x.transpose(1, 2), y.unsqueeze(-1)), DispatchError, "do not fit together"),
        ((x.transpose(1, 2), other), ValueError, "same length"),
    ):
        with pytest.raises(error, match=words):
            loss(*arguments)
    with pytest.raises(DispatchError, match="use reduction"):
        loss(x.transpose(1, 2), y, size_average=True)
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        loss(x.transpose(1, 2), y, reduction="most")
