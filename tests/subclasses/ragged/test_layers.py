"""The rules that layers and losses of classes have in both layouts, with a loop over the rows as judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

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
kinds = pytest.mark.parametrize("kind", KINDS)


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


# ---- layers ----------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_look_at_all_indices(kind, options):
    rows, weight = [torch.randint(0, 5, (n,)) for n in LENGTHS], torch.randn(5, 3, dtype=torch.float64)
    if kind != "jagged":
        with pytest.raises(DispatchError, match=r"embedding: max_norm.*from_tensors"):
            F.embedding(KINDS[kind](rows), weight, **options)
    leaves = [weight.clone().requires_grad_() for _ in range(2)]
    got = F.embedding(JaggedTensor.from_tensors(rows), leaves[0], **options).unwrap("values")
    expected = F.embedding(torch.cat(rows), leaves[1], **options)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(t.square().sum(), w) for t, w in zip((got, expected), leaves, strict=True)]
    torch.testing.assert_close(*grads)


ONES = torch.ones(3, 4, dtype=torch.float64)
PARAMETERS = r": expected dense parameters"
REFUSED = {
    # products along the rows
    "a vector of places": (lambda x, y: x.mT @ ONES.new_ones(x.shape[1]), DispatchError, "matmul"),
    "a matrix of rows": (lambda x, y: ONES.new_ones(5, 3) @ x[..., 0], DispatchError, "matmul"),
    "a vector of rows": (lambda x, y: ONES.new_ones(3) @ x[..., 0], DispatchError, "matmul"),
    # ragged parameters
    "linear": (lambda x, y: F.linear(ONES, x), DispatchError, f"linear{PARAMETERS}"),
    "layer_norm": (lambda x, y: F.layer_norm(ONES, (4,), x), DispatchError, f"layer_norm{PARAMETERS}"),
    "rms_norm": (lambda x, y: F.rms_norm(ONES, (4,), x), DispatchError, f"rms_norm{PARAMETERS}"),
    "embedding": (lambda x, y: F.embedding(ONES.long(), x), DispatchError, f"embedding{PARAMETERS}"),
    # losses of classes
    **{
        f"{loss.__name__}, {name}": (lambda x, y, call=call, loss=loss: call(loss, x, y), error, words)
        for loss in (F.cross_entropy, F.nll_loss)
        for name, (call, error, words) in {
            "classes last": (lambda f, x, y: f(x, y), DispatchError, r"transpose\(1, 2\)"),
            "dense logits": (
                lambda f, x, y: f(torch.ones(5, 4), y.flatten(0, 1)),
                DispatchError,
                "expected ragged logits",
            ),
            "merged targets": (
                lambda f, x, y: f(x.mT, y.flatten(0, 1)),
                DispatchError,
                "do not fit together",
            ),
            "a dimension too many": (
                lambda f, x, y: f(x.mT, y.unsqueeze(-1)),
                DispatchError,
                "do not fit together",
            ),
            "an old option": (lambda f, x, y: f(x.mT, y, size_average=True), DispatchError, "use reduction"),
            "no reduction": (
                lambda f, x, y: f(x.mT, y, reduction="most"),
                ValueError,
                "not a valid value for reduction",
            ),
            "other lengths": (
                lambda f, x, y: f(x.mT, y[[2, 0, 1]] if type(y) is JaggedTensor else y[:2]),
                ValueError,
                "rows|length",
            ),
        }.items()
    },
}


@kinds
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit(kind, name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call(KINDS[kind](rows_of(4)), KINDS[kind]([torch.randint(0, 4, (n,)) for n in LENGTHS]))


# ---- losses of classes -----------------------------------------------------------------------------------------


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
