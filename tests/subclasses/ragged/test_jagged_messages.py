"""What is refused of jagged rows, and of rows of either layout: the error says what came, and what to do."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import raising, working

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
MASK = torch.ones(3, 3, dtype=torch.bool)

REFUSED = {
    # an index
    "a mask beside a number": (
        lambda: jagged()[0, jagged() > 0],
        r"indexing a JaggedTensor of size \(3, 3, 4\), ragged along 1: expected ints, slices, None, lists and dense "
        r"tensors, got \[0, a JaggedTensor of size .*\]; apply a mask of the same rows alone, x\[mask\], and index",
    ),
    "a truth value": (lambda: jagged()[True], r"expected ints, .* and dense tensors, got \[True\]; apply"),
    "a padded value beside a slice": (
        lambda: padded()[:, padded()],
        "indexing a PaddedTensor of size .* expected ints, slices, None, lists and dense tensors, got "
        r"\[:, a PaddedTensor of size \(3, 3, 4\), rows along 0, ragged along 1\]",
    ),
    "a matrix of rows": (
        lambda: jagged()[torch.zeros(2, 2, dtype=torch.long)],
        r"indexing a JaggedTensor of size .* expected rows as an int, a slice, a list or a tensor \[n\] of ints or "
        r"bools, got torch.int64 of shape \(2, 2\)",
    ),
    "rows by fractions": (
        lambda: padded()[torch.tensor([0.5, 1])],
        r"indexing a PaddedTensor of size .* expected rows as an int, .* of ints or bools, got torch.float32 of shape "
        r"\(2,\)",
    ),
    "rows by a list of fractions": (
        lambda: jagged()[[0.5, 1.0]],
        r"expected rows as an int, a slice, a list or a tensor \[n\] of ints or bools, got torch.float32 of shape "
        r"\(2,\)",
    ),
    "places by fractions": (
        lambda: jagged()[:, torch.tensor([0.5, 1])],
        r"expected places of every row as .* a list or a tensor \[n\] of ints, got torch.float32 of shape \(2,\)",
    ),
    "a dense mask": (
        lambda: jagged()[MASK],
        r"indexing a JaggedTensor of size .* by a Tensor of size \(3, 3\): a mask of entries is a JaggedTensor with "
        r"the same rows, such as x\[..., 0\].like_dense\(mask\)",
    ),
    "a dense mask of elements": (
        lambda: jagged()[MASK.unsqueeze(-1).expand(3, 3, 4)],
        r"a mask of entries is a JaggedTensor with the same rows, such as x.like_dense\(mask\)",
    ),
    "a mask of rows beside places": (
        lambda: jagged()[ROWS, PLACES],
        r"indexing a JaggedTensor .*: index by one ragged mask, or by two index tensors of ints; a mask .*, such as "
        r"x\[..., 0\].like_dense\(mask\)",
    ),
    "values that are no mask": (
        lambda: jagged()[jagged()],
        "indexing a JaggedTensor of size .*: expected a bool mask of the same rows, ragged along 1, got a JaggedTensor "
        r"of size \(3, 3, 4\), ragged along 1, torch.float32",
    ),
    "values that are no mask to select by": (
        lambda: torch.masked_select(jagged(), jagged()),
        "masked_select of a JaggedTensor of size .*: expected a bool mask of the same rows, .*, torch.float32",
    ),
    "a mask of merged rows": (
        lambda: jagged()[merged() > 0],
        r"a bool mask of the same rows, ragged along 1, got a JaggedTensor of size \(6, 4\), ragged along 0, "
        r"torch.bool; unmerge it by mask.unflatten\(0, \(B, T\)\)",
    ),
    "a mask of rows of merged ones": (
        lambda: merged()[jagged() > 0],
        r"ragged along 0, got a JaggedTensor .*, ragged along 1, torch.bool; merge it by mask.flatten\(0, 1\)",
    ),
    "a mask of rows that are turned": (
        lambda: turned()[turned() > 0],
        r"indexing a JaggedTensor of size \(3, 4, 3\), ragged along 2 by a mask: rows are ragged along 1 "
        r"there; write x.transpose\(1, 2\), and the same for the mask",
    ),
    # dimensions
    "merged dimensions turned": (
        lambda: merged().transpose(0, 1),
        r"transpose.int: the merged dimensions of a JaggedTensor of size \(6, 4\), ragged along 0 stay first; "
        r"x.to_dense\(\) or x.unwrap\('values'\) gives a tensor without this limit",
    ),
    "a dimension before merged ones": (
        lambda: merged().unsqueeze(0),
        r"unsqueeze.default: the merged dimensions of a JaggedTensor of size \(6, 4\), .* x.unwrap\('values'\) gives",
    ),
    "a view with the rows second": (
        lambda: (
            lambda x: x.as_strided((x.shape[1], x.shape[0], 4), (x.stride(1), x.stride(0), x.stride(2)))
        )(jagged(lengths=(2, 3, 1, 1))),
        r"as_strided: the rows of a JaggedTensor of size \(4, 3, 4\), .* stay at the first dimension, got the "
        r"size \[3, 4, 4\]; x.to_dense\(\) gives a tensor without this limit",
    ),
    "a view that begins elsewhere": (
        lambda: (lambda x: x.as_strided(x.shape, x.stride(), 7))(jagged()),
        r"as_strided.*: a JaggedTensor of size .* viewed with the beginning 7, .* a copy by clone\(\)",
    ),
    # joining
    "a feature joined with a row": (
        lambda: torch.cat([jagged(), torch.zeros(4, 4)], -1),
        r"cat.*: expected ragged tensors or dense ones of as many dimensions as a JaggedTensor of size \(3, 3, 4\), "
        r"ragged along 1, got a Tensor of size \(4, 4\)",
    ),
    "a feature stacked with a row": (
        lambda: torch.stack([jagged(), torch.zeros(4)], -1),
        r"stack.*: expected ragged tensors or dense ones of as many dimensions as .*, got a Tensor of size \(4,\)",
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
        r"norm: expected a vector norm of a JaggedTensor of size .*, p='fro' or a number, got p='nuc'; x.to_dense\(\)",
    ),
    "a norm into a tensor": (
        lambda: torch.norm(jagged(), p=2, dim=1, out=torch.zeros(3)),
        r"norm: a result of a JaggedTensor of size \(3, 3, 4\), ragged along 1 is a new one, and not written to an "
        r"out=",
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


test_refused = raising(REFUSED)

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
        "mse_loss: expected reduction 'none', 'mean' or 'sum', got 'avg'",
    ),
    "a mean by the batch of another loss": (
        lambda: F.mse_loss(jagged(), jagged(), reduction="batchmean"),
        ValueError,
        "mse_loss: expected reduction 'none', 'mean' or 'sum', got 'batchmean'",
    ),
    "a divergence that is reduced by none": (
        lambda: F.kl_div(jagged(), jagged(), reduction="avg"),
        ValueError,
        "kl_div: expected reduction 'none', 'mean', 'batchmean' or 'sum', got 'avg'",
    ),
    "a mean of integers": (
        lambda: JaggedTensor.from_tensors([torch.arange(3)]).mean(),
        RuntimeError,
        "mean: expected a floating point or complex dtype, got torch.int64; give dtype",
    ),
    "an interpolation that is none": (
        lambda: torch.quantile(jagged(), 0.5, 1, interpolation="cubic"),
        RuntimeError,
        "quantile: expected interpolation 'linear', 'lower', 'higher', 'midpoint' or 'nearest', got 'cubic'",
    ),
    "an interpolation of what is no NaN": (
        lambda: torch.nanquantile(jagged(), 0.5, 1, interpolation="cubic"),
        RuntimeError,
        "nanquantile: expected interpolation 'linear', .* or 'nearest', got 'cubic'",
    ),
    "a factor of another extent": (
        lambda: torch.einsum("btd,bte->bde", jagged(), torch.ones(3, 7, 2)),
        ValueError,
        r"einsum: 'btd,bte->bde': expected the extent 3, as of the ragged operand, or 1 for 't' of the dense operand "
        r"'bte', got a Tensor of size \(3, 7, 2\)",
    ),
    "a factor of another extent for all rows": (
        lambda: torch.einsum("btd,te->bde", jagged(), torch.ones(7, 2)),
        ValueError,
        r"einsum: 'btd,te->bde': expected the extent 3, .* for 't' of the dense operand 'te', got a Tensor of size "
        r"\(7, 2\)",
    ),
    "bags of another mode": (
        lambda: F.embedding_bag(
            PaddedTensor.from_tensors([torch.tensor([0, 1])]), torch.ones(3, 2), mode="mode"
        ),
        ValueError,
        "embedding_bag: expected mode 'sum', 'mean' or 'max', got 'mode'",
    ),
}


test_wrong_arguments = raising(WRONG)

# ---- what the errors advise ------------------------------------------------------------------------------------

ADVICE = {
    "two index tensors": lambda: jagged()[ROWS.nonzero().squeeze(1), PLACES],
    "one ragged mask": lambda: (lambda x: x[x > 0])(jagged()),
    "a mask of entries": lambda: (lambda x: x[x[..., 0].like_dense(MASK)])(jagged()),
    "a mask of elements": lambda: (lambda x: x[x.like_dense(MASK.unsqueeze(-1).expand(3, 3, 4))])(jagged()),
    "a mask alone": lambda: (lambda x: x[x > 0][0])(jagged()),
    "a mask unmerged": lambda: (lambda x: x[(x.flatten(0, 1) > 0).unflatten(0, (3, 3))])(jagged()),
    "a mask merged": lambda: (lambda x: x.flatten(0, 1)[(x > 0).flatten(0, 1)])(jagged()),
    "rows turned back": lambda: (lambda x: x.transpose(1, 2)[(x > 0).transpose(1, 2)])(turned()),
    "merged and dense": lambda: merged().to_dense().unsqueeze(0),
    "merged values": lambda: merged().unwrap("values").transpose(0, 1),
    "a mean by the batch": lambda: F.kl_div(jagged(), jagged(), reduction="batchmean"),
    "an interpolation": lambda: torch.nanquantile(jagged(), 0.5, 1, interpolation="midpoint"),
    "a dense factor": lambda: torch.einsum("btd,te->bde", jagged(), torch.ones(3, 2)),
    "unmerged": lambda: merged().unflatten(0, (3, 3)).transpose(1, 2),
    "as many dimensions": lambda: torch.cat([jagged(), torch.zeros(3, 3, 1)], -1),
    "to_dense": lambda: torch.zeros(3, 3, 4).copy_(jagged().to_dense()),
    "reduction": lambda: F.mse_loss(jagged(), jagged(), reduction="sum"),
    "dtype": lambda: JaggedTensor.from_tensors([torch.arange(3)]).mean(dtype=torch.float32),
    "a dense mask of scores": lambda: attend(heads(jagged), torch.ones(3, 3, dtype=torch.bool).tril()),
}


test_what_is_advised_works = working(ADVICE)
