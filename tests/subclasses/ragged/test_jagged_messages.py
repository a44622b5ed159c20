"""What is refused of jagged rows, and of rows of either layout: the error says what came, and what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor

LENGTHS = (3, 1, 2)


def jagged(*width, lengths=LENGTHS):
    return JaggedTensor.from_tensors([torch.randn(n, *(width or (4,))) for n in lengths])


def padded(*width, lengths=LENGTHS, **options):
    return PaddedTensor.from_tensors([torch.randn(n, *(width or (4,))) for n in lengths], **options)


def merged():
    return jagged().flatten(0, 1)


def turned():
    """The places in a row last: ``[B, 4, T]``."""
    return jagged().transpose(1, 2)


def heads(make):
    return make(2, 4).transpose(1, 2)


def attend(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


ROWS = torch.tensor([True, False, True])
PLACES = torch.tensor([0, 1])

REFUSED = {
    # an index
    "a mask beside a number": (
        lambda: jagged()[0, jagged() > 0],
        r"indexing a JaggedTensor of size \(3, 3, 4\), ragged along 1: expected ints, slices, None, lists and dense",
    ),
    "a truth value": (lambda: jagged()[True], r"expected ints, .* and dense tensors, got \(True,\)"),
    "a padded value beside a slice": (
        lambda: padded()[:, padded()],
        "indexing a PaddedTensor of size .* expected ints, slices, None, lists and dense tensors, got",
    ),
    "a matrix of rows": (
        lambda: jagged()[torch.zeros(2, 2, dtype=torch.long)],
        r"indexing a JaggedTensor of size .* expected rows as an int, a slice, a list or a tensor \[n\]",
    ),
    "rows by fractions": (
        lambda: padded()[torch.tensor([0.5, 1])],
        r"indexing a PaddedTensor of size .* expected rows as an int",
    ),
    "a mask of rows beside places": (
        lambda: jagged()[ROWS, PLACES],
        "indexing a JaggedTensor .*: index by one ragged mask, or by two index tensors of ints",
    ),
    "values that are no mask": (
        lambda: jagged()[jagged()],
        "indexing a JaggedTensor of size .*: expected a bool mask of the same rows, got a JaggedTensor",
    ),
    "a mask of merged rows": (
        lambda: jagged()[merged() > 0],
        r"a bool mask of the same rows, got a JaggedTensor of size \(6, 4\), ragged along 0",
    ),
    "a mask of rows that are turned": (
        lambda: turned()[turned() > 0],
        r"indexing a JaggedTensor of size \(3, 4, 3\), ragged along 2: .* mask",
    ),
    # dimensions
    "merged dimensions turned": (
        lambda: merged().transpose(0, 1),
        r"transpose.int: merged dimensions stay first; unmerge them by x.unflatten\(0, \(B, T\)\)",
    ),
    "a dimension before merged ones": (
        lambda: merged().unsqueeze(0),
        "unsqueeze.default: merged dimensions stay first",
    ),
    "a view with the rows second": (
        lambda: (
            lambda x: x.as_strided((x.shape[1], x.shape[0], 4), (x.stride(1), x.stride(0), x.stride(2)))
        )(jagged(lengths=(2, 3, 1, 1))),
        r"as_strided: the rows of a JaggedTensor of size \(4, 3, 4\), .* stay at the first dimension, got \[3, 4, 4\]",
    ),
    "a view that begins elsewhere": (
        lambda: (lambda x: x.as_strided(x.shape, x.stride(), 7))(jagged()),
        r"as_strided.*: a JaggedTensor of size .* viewed with the beginning 7, .* a copy by clone\(\)",
    ),
    # joining
    "a feature joined with a row": (
        lambda: torch.cat([jagged(), torch.zeros(4, 4)], -1),
        r"cat.*: expected ragged tensors or dense ones of as many dimensions, got a Tensor of size \(4, 4\)",
    ),
    "a feature stacked with a row": (
        lambda: torch.stack([jagged(), torch.zeros(4)], -1),
        r"stack.*: expected ragged tensors or dense ones of as many dimensions, got a Tensor of size \(4,\)",
    ),
    # writes
    "into a dense tensor": (
        lambda: torch.ops.aten.copy_(torch.zeros(3, 3, 4), jagged()),
        r"copy_.*: cannot write a JaggedTensor of size .* into a dense tensor; use to_dense\(\)",
    ),
    # losses and reductions
    "a loss that is averaged the old way": (
        lambda: F.mse_loss(jagged(), jagged(), size_average=True),
        "mse_loss: size_average and reduce are deprecated; use reduction",
    ),
    "another loss that is reduced the old way": (
        lambda: F.margin_ranking_loss(*[jagged()] * 3, reduce=True),
        "margin_ranking_loss: size_average and reduce are deprecated; use reduction",
    ),
    "the nuclear norm": (
        lambda: torch.norm(jagged(), p="nuc"),
        r"norm: expected a vector norm of a JaggedTensor of size .*, got p='nuc'",
    ),
    "a norm into a tensor": (
        lambda: torch.norm(jagged(), p=2, dim=1, out=torch.zeros(3)),
        "norm: expected a vector norm of a JaggedTensor .*, and no out=",
    ),
    # attention
    "a jagged mask of scores": (
        lambda: attend(heads(jagged), heads(jagged) > 0),
        r"expected a dense attn_mask that broadcasts against \[B, ..., T, S\], got a JaggedTensor of size",
    ),
    "a padded mask of scores": (
        lambda: attend(heads(padded), heads(padded) > 0),
        "scaled_dot_product_attention: expected a dense attn_mask .* got a PaddedTensor of size",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, text = REFUSED[name]
    with pytest.raises(DispatchError, match=text):
        call()


# What PyTorch refuses of plain tensors as well, by an error of the same type.
WRONG = {
    "lengths of no rows": (
        lambda: JaggedTensor.from_lengths(torch.zeros(4), torch.ones(2, 2, dtype=torch.long)),
        ValueError,
        r"from_lengths: expected lengths of shape \[B\], one for each row, got \(2, 2\)",
    ),
    "a reduction that is none": (
        lambda: F.mse_loss(jagged(), jagged(), reduction="avg"),
        ValueError,
        "mse_loss: avg is not a valid value for reduction",
    ),
    "a mean of integers": (
        lambda: JaggedTensor.from_tensors([torch.arange(3)]).mean(),
        RuntimeError,
        "mean: expected a floating point or complex dtype, got torch.int64; give dtype",
    ),
    "an interpolation that is none": (
        lambda: torch.quantile(jagged(), 0.5, 1, interpolation="cubic"),
        RuntimeError,
        "quantile: 'cubic' is not a valid value for interpolation",
    ),
    "a factor of another extent": (
        lambda: torch.einsum("btd,bte->bde", jagged(), torch.ones(3, 7, 2)),
        ValueError,
        r"einsum: a dense operand of size \(3, 7, 2\) beside rows of extents \(3, 3\)",
    ),
    "bags of another mode": (
        lambda: F.embedding_bag(
            PaddedTensor.from_tensors([torch.tensor([0, 1])]), torch.ones(3, 2), mode="mode"
        ),
        ValueError,
        "embedding_bag: expected mode 'sum', 'mean' or 'max', got 'mode'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()


# ---- what the errors advise ------------------------------------------------------------------------------------

ADVICE = {
    "two index tensors": lambda: jagged()[ROWS.nonzero().squeeze(1), PLACES],
    "one ragged mask": lambda: (lambda x: x[x > 0])(jagged()),
    "unmerged": lambda: merged().unflatten(0, (3, 3)).transpose(1, 2),
    "as many dimensions": lambda: torch.cat([jagged(), torch.zeros(3, 3, 1)], -1),
    "to_dense": lambda: torch.zeros(3, 3, 4).copy_(jagged().to_dense()),
    "reduction": lambda: F.mse_loss(jagged(), jagged(), reduction="sum"),
    "dtype": lambda: JaggedTensor.from_tensors([torch.arange(3)]).mean(dtype=torch.float32),
    "a dense mask of scores": lambda: attend(heads(jagged), torch.ones(3, 3, dtype=torch.bool).tril()),
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_advised_works(name):
    ADVICE[name]()
