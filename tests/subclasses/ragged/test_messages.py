"""Errors about rows as operands, in layers and in files name the wrong value, and a way out."""

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subclasses.autograd.python_functions import twins
from subclasses.ragged import JaggedTensor, PaddedTensor, register
from subclasses.rules.checks import check_key, check_rule
from tests.subclasses.ragged.judge import same, working
from tests.tables import raising

LENGTHS, CLASSES = (3, 1, 2), (JaggedTensor, PaddedTensor)
NAME = r"a PaddedTensor of size \(3, 3, 4\), rows along 0, ragged along 1"
BATCH = r"; x.to_jagged\(\), or a batch that is not padded, has no such limit"
SIZE = r" of size \(3, 3, 4\)"


def make(cls, *width, lengths=LENGTHS, **options):
    return cls.from_tensors([torch.randn(n, *(width or (4,))) for n in lengths], **options)


def jagged(*width, **options):
    return make(JaggedTensor, *width, **options)


def padded(*width, **options):
    return make(PaddedTensor, *width, **options)


def batch():
    """Three rows, and one that the batch has not."""
    return padded(batch_multiple=4)


def merged(rows=jagged):
    return rows().flatten(0, 1)


def turned(rows=jagged):
    """The places in a row last: ``[B, 4, T]``."""
    return rows().transpose(1, 2)


def places_first():
    return padded().transpose(0, 1)


def heads(rows):
    return rows(2, 4).transpose(1, 2)


def attend(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def written(x, index, value):
    x[index] = value


CHOSEN, ROWS, PLACES = torch.tensor([True, False, True]), torch.tensor([0, 2]), torch.tensor([0, 1])
MASK = torch.ones(3, 3, dtype=torch.bool)

# ---- jagged rows -----------------------------------------------------------------------------------------------

JAGGED = {
    # an index
    "a mask beside a number": (
        lambda: jagged()[0, jagged() > 0],
        r"indexing a JaggedTensor of size \(3, 3, 4\), ragged along 1: expected ints, slices, None, lists and dense "
        r"tensors, got \[0, a JaggedTensor of size .*\]; apply a mask of the same rows alone, x\[mask\], and index",
    ),
    "a truth value": (
        lambda: jagged()[True],
        r"expected ints, .* and dense tensors, got \[True\]; apply",
    ),
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
        lambda: jagged()[CHOSEN, PLACES],
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
test_refused_of_jagged_rows = raising(JAGGED)

# PyTorch refuses these for plain tensors as well, by an error of the same type.
test_wrong_arguments = raising(
    {
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
            r"einsum: 'btd,bte->bde': expected the extent 3, as of the ragged operand, or 1 for 't' of the dense "
            r"operand 'bte', got a Tensor of size \(3, 7, 2\)",
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
)

test_what_is_advised_of_jagged_rows_works = working(
    {
        "two index tensors": lambda: jagged()[CHOSEN.nonzero().squeeze(1), PLACES],
        "one ragged mask": lambda: (lambda x: x[x > 0])(jagged()),
        "a mask of entries": lambda: (lambda x: x[x[..., 0].like_dense(MASK)])(jagged()),
        "a mask of elements": lambda: (lambda x: x[x.like_dense(MASK.unsqueeze(-1).expand(3, 3, 4))])(
            jagged()
        ),
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
)

# ---- padded rows -----------------------------------------------------------------------------------------------

PADDED = {
    # operands
    "rows elsewhere": (
        lambda: padded() + places_first(),
        f"add: padded tensors combine when they have as many dimensions and their rows at the same ones, got {NAME} "
        f"and a PaddedTensor .*, rows along 1, ragged along 0; add dimensions by unsqueeze, or swap them by transpose",
    ),
    "fewer dimensions": (
        lambda: padded() * padded()[..., 0],
        r"mul: padded tensors combine .* and a PaddedTensor of size \(3, 3\)",
    ),
    "a single row": (
        lambda: padded() + padded(lengths=(3,)),
        rf"add: a single row is not repeated: {NAME} and a PaddedTensor of size \(1, 3, 4\), .*; a table is, with 0 "
        rf"where it has no entry: write y.to_dense\(\) for the table of a single row$",
    ),
    "a single row of another width": (
        lambda: padded() + padded(lengths=(2,)),
        r"write y.to_dense\(\) for the table of a single row, after x.to_padded\(at_least=3\) for both",
    ),
    "factors of other widths": (
        lambda: padded().mT @ padded().to_padded(at_least=5),
        r"matmul: expected tables of one width, got 3 for .*\(3, 4, 3\).* and 5 for .*\(3, 5, 4\), .*; use "
        r"x.to_padded\(at_least=5\)",
    ),
    "factors with their rows elsewhere": (
        lambda: padded(2, 5).permute(0, 2, 3, 1) @ padded(2, 5).permute(2, 0, 1, 3),
        r"matmul: a PaddedTensor .*, rows along 0, ragged along 3 and a PaddedTensor .*, rows along 1, ragged along 2 "
        r"have their rows at other places; use transpose",
    ),
    # joining
    "features of other widths": (
        lambda: torch.cat([padded(), padded().to_padded(at_least=5)], -1),
        rf"cat.*: expected tables of the same rows and width as {NAME}, got a PaddedTensor of size \(3, 5, 4\)",
    ),
    "a feature of one row": (
        lambda: torch.cat([padded(), torch.zeros(1, 1, 4)], -1),
        r"cat: expected tables of the same rows and width as .*, got a Tensor of size \(1, 1, 4\)",
    ),
    "rows behind a padded batch": (
        lambda: torch.cat([batch(), padded()]),
        rf"cat: expected batches that are not padded, got tensors\[0\] with a row_count, a PaddedTensor of size "
        rf"\(4, 3, 4\), rows along 0, ragged along 1{BATCH}",
    ),
    "a padded batch behind rows": (
        lambda: torch.cat([padded(), batch()]),
        r"cat: expected batches that are not padded, got tensors\[1\] with a row_count",
    ),
    # dimensions
    "places in parts": (
        lambda: padded().unflatten(1, (3, 1)),
        f"unflatten: {NAME} stays whole along its rows, got dimension 1; x.to_dense",
    ),
    "a view that begins elsewhere": (
        lambda: (lambda x: x.as_strided(x.shape, x.stride(), 7))(padded()),
        f"as_strided.*: {NAME} that begins at 0 of its storage is viewed with the beginning 7",
    ),
    # an index
    "every second row of a batch": (
        lambda: batch()[::2],
        f"slice.*: rows of a padded batch are taken with step 1, got step 2{BATCH}",
    ),
    "several features": (
        lambda: padded(4, 5)[:, :, [0, 1], [1, 2]],
        r"indexing a PaddedTensor of size \(3, 3, 4, 5\).*: expected one index tensor \[n\] for the features, got "
        r"\[:, :, \[0, 1\], \[1, 2\]\]; x.to_jagged\(\) takes several",
    ),
    "pairs beside a number": (
        lambda: padded()[[0, 1], [0, 0], 1],
        rf"indexing {NAME}: index tensors stand beside whole dimensions, got \[\[0, 1\], \[0, 0\], 1\]; index in two "
        rf"steps, as in x\[rows, places\]\[..., 1\]",
    ),
    "pairs by tensors beside a number": (
        lambda: padded()[ROWS, PLACES, 1],
        r"got \[a Tensor of size \(2,\), a Tensor of size \(2,\), 1\]; index in two",
    ),
    "a dense mask": (
        lambda: padded()[MASK],
        rf"indexing {NAME} by a Tensor of size \(3, 3\): a mask of entries is a PaddedTensor with the same rows, such "
        rf"as x\[..., 0\].like_dense\(mask\)",
    ),
    "a mask of rows beside places": (
        lambda: padded()[torch.tensor([True, False, True]), PLACES],
        rf"indexing {NAME}: index by one ragged mask, or by two index tensors of ints; a mask of entries is a "
        rf"PaddedTensor with the same rows, such as x\[..., 0\].like_dense\(mask\)",
    ),
    "values that are no mask": (
        lambda: padded()[padded()],
        f"indexing {NAME}: expected a bool mask of its rows, .*, got {NAME}, torch.float32",
    ),
    "a mask of other features": (
        lambda: torch.masked_select(padded(), padded(5) > 0),
        rf"masked_select of {NAME}: expected a bool mask of its rows, with the dimensions of an entry or none, got a "
        rf"PaddedTensor of size \(3, 3, 5\), .*, torch.bool",
    ),
    "a mask of rows that are turned": (
        lambda: (lambda x: x[x > 0])(padded().mT),
        r"indexing a PaddedTensor of size \(3, 4, 3\).* by a mask: expected rows along 0, ragged along 1, of both; use "
        r"transpose",
    ),
    # writes
    "rows into an entry of each": (
        lambda: written(padded(), (slice(None), 0), padded()),
        rf"writing into {NAME}: expected a dense value for \[:, 0, :\], got {NAME}",
    ),
    "a place of rows that are second": (
        lambda: written(places_first(), 0, 1.0),
        "writing into .*, rows along 1, ragged along 0: one place of every row needs the batch dimension "
        r"just before it; write to x.transpose\(0, 1\)",
    ),
    "a place of rows apart": (
        lambda: written(padded(2, 5).transpose(1, 3), (..., 0), 1.0),
        r"rows along 0, ragged along 3: one place of every row needs .*; write to x.movedim\(3, 1\)",
    ),
    "a place of rows behind": (
        lambda: written(padded(2, 5).movedim(0, 2), 0, 1.0),
        r"rows along 2, ragged along 0: one place of every row needs .*; write to x.movedim\(0, 2\)",
    ),
    "values by what is no mask": (
        lambda: (lambda x: written(x, x, x))(padded().mT),
        r"writing into a PaddedTensor of size \(3, 4, 3\), .*: expected a number, or the result of x\[mask\]",
    ),
    "rows put": (
        lambda: padded().index_put((ROWS,), padded(lengths=(3, 2))),
        f"index_put: expected dense values for a padded tensor, got a PaddedTensor .* for {NAME}; write "
        rf"x\[index\] = values",
    ),
    "into merged rows": (
        lambda: merged(padded).index_put((ROWS,), torch.zeros(4)),
        r"writing into a PaddedTensor of size \(9, 4\), rows along 0, ragged along 0: merged dimensions stay whole; "
        r"unmerge them by x.unflatten\(0, \(B, T\)\)",
    ),
    "places of all rows": (
        lambda: places_first().index_put((PLACES,), torch.zeros(4)),
        "writing into .*, rows along 1, ragged along 0: index tensors for places need index tensors for rows",
    ),
    "a dense mask put": (
        lambda: padded().index_put((MASK,), torch.zeros(4)),
        r"by a Tensor of size \(3, 3\): a mask of entries is a PaddedTensor with the same rows, such as",
    ),
    "a reduction that is none": (
        lambda: F.l1_loss(padded(), padded(), reduction="avg"),
        ValueError,
        "l1_loss: expected reduction 'none', 'mean' or 'sum', got 'avg'",
    ),
    "into a dense tensor": (
        lambda: torch.ops.aten.copy_(torch.zeros(3, 3, 4), padded()),
        rf"copy_.*: cannot write {NAME} into a dense tensor; use to_dense\(\)",
    ),
}
test_refused_of_padded_rows = raising(PADDED)


def in_a_graph(call, make=padded, **options):
    """A call of a compiled function, with Dynamo's own error around ours."""
    return lambda: torch.compile(call, backend="eager", fullgraph=True, **options)(make())


PLAIN = r"PaddedTensor: rows as plain tensors have sizes .* slices, x\[:, -1\] and"
UNKNOWN = (
    r"rows of a padded batch are taken where their number is known, and this compiled function is to take any; "
    r"compile it with dynamic=False, or give it a batch that is not padded"
)
test_refused_in_a_graph = raising(
    {
        "to_tensors": (in_a_graph(lambda x: x.to_tensors()), Exception, PLAIN),
        "unbind": (in_a_graph(lambda x: x.unbind(0)), Exception, PLAIN),
        "a row": (in_a_graph(lambda x: x[0]), Exception, PLAIN),
        "a slice of a batch": (in_a_graph(lambda x: x[1:] * 1, batch, dynamic=True), Exception, UNKNOWN),
    }
)


test_what_is_advised_of_padded_rows_works = working(
    {
        "unsqueeze": lambda: (lambda x: x * x[..., 0].unsqueeze(-1))(padded()),
        "to_padded": lambda: padded().to_padded(at_least=5).mT @ padded().to_padded(at_least=5),
        "to_jagged and cat": lambda: torch.cat([batch().to_jagged(), padded().to_jagged()]),
        "to_jagged and a step": lambda: batch().to_jagged()[::2],
        "to_jagged and several features": lambda: padded(4, 5).to_jagged()[:, :, [0, 1], [1, 2]],
        "two index tensors": lambda: padded()[ROWS, PLACES],
        "whole dimensions": lambda: padded()[[0, 1], [0, 0]][..., 1],
        "transpose": lambda: (lambda x: x[x > 0])(padded().mT.transpose(1, 2)),
        "a dense value": lambda: written(padded(), (slice(None), 0), torch.zeros(3, 4)),
        "the batch dimension before": lambda: written(places_first().transpose(0, 1), (slice(None), 0), 1.0),
        "a place of rows apart": lambda: written(
            padded(2, 5).transpose(1, 3).movedim(3, 1), (slice(None), 0), 1.0
        ),
        "a place of rows behind": lambda: written(
            padded(2, 5).movedim(0, 2).movedim(0, 2), (..., 0, slice(None)), 1.0
        ),
        "a mask of entries": lambda: (lambda x: x[x[..., 0].like_dense(MASK)])(padded()),
        "a mask of entries of two dimensions": lambda: (lambda x: x[x[..., 0, 0].like_dense(MASK)])(
            padded(2, 5)
        ),
        "a mask of merged elements": lambda: (lambda x: x[x.like_dense(torch.ones(9, 4, dtype=torch.bool))])(
            merged(padded)
        ),
        "a table of a single row": lambda: padded() + padded(lengths=(3,)).to_dense(),
        "a wider table of one": lambda: padded() + padded(lengths=(2,)).to_padded(at_least=3).to_dense(),
        "to_dense and unflatten": lambda: padded().to_dense().unflatten(1, (3, 1)),
        "unmerged rows put": lambda: merged(padded).unflatten(0, (3, 3)).index_put((ROWS,), torch.zeros(4)),
        "rows written": lambda: written(padded(), ROWS, padded(lengths=(3, 2))),
        "dense values": lambda: padded().index_put((ROWS,), torch.zeros(2, 3, 4)),
        "index tensors for rows": lambda: places_first().index_put((PLACES[:, None], ROWS), torch.zeros(4)),
    }
)
test_what_is_advised_works_in_a_graph = working(
    {
        "a slice": in_a_graph(lambda x: x[:, 1:]),
        "the last": in_a_graph(lambda x: x[:, -1]),
        "a mask": in_a_graph(lambda x: x[x > 0]),
        "dynamic=False": in_a_graph(lambda x: x[1:] * 1, batch, dynamic=False),
        "a batch that is not padded": in_a_graph(lambda x: x[1:] * 1, dynamic=True),
    }
)


# ---- files -----------------------------------------------------------------------------------------------------

WRONG = {
    "two numbers of rows": (
        {"inners": {"row_count": torch.tensor([1, 1])}},
        r"PaddedTensor.row_count: expected shape \[1\], got \(2,\)",
    ),
    "merged at a dimension that is not there": (
        {"metadata": {"ragged_dim": 5, "batch_dim": 5}},
        r"PaddedTensor.batch_dim: expected a dimension of the table of shape \(12, 4\), got 5",
    ),
    "merged at one from the end": (
        {"metadata": {"ragged_dim": -1, "batch_dim": -1}},
        r"PaddedTensor.batch_dim: expected a dimension of the table of shape \(12, 4\), got -1",
    ),
}


def made_again(inners=None, metadata=None):
    """A value rebuilt from a file, with changed inner tensors or metadata."""
    rebuild, (cls, *fields) = batch().flatten(0, 1).__reduce_ex__(2)
    return rebuild(cls, fields[0] | (inners or {}), fields[1] | (metadata or {}), *fields[2:])


test_what_a_file_of_merged_rows_may_not_say = raising(
    {
        name: (lambda changed=changed: made_again(**changed), ValueError, text)
        for name, (changed, text) in WRONG.items()
    }
)
test_what_a_file_of_merged_rows_says = working({"as it is": made_again})


# ---- layers ----------------------------------------------------------------------------------------------------

LAYERS = nn.GRU, nn.LSTM, nn.RNN
FIRST = nn.GRU(4, 5, batch_first=True)
ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(max(LENGTHS))
TURNED = JaggedTensor.from_tensors([torch.randn(4, LENGTHS[0])]).transpose(1, 2)
STATES = JaggedTensor.from_tensors([torch.zeros(3, 5)])


def attend_itself(cls, layer=ATTENTION, **options):
    x = make(cls)
    return layer(x, x, x, **options)


test_refused_of_layers = raising(
    {
        **{
            f"{layer.__name__} without batch_first, {cls.__name__}": (
                lambda layer=layer, cls=cls: layer(4, 5)(make(cls)),
                rf": a layer without batch_first takes \[T, B, C\], got a {cls.__name__}{SIZE}, .*; make the layer "
                r"with batch_first=True",
            )
            for layer in LAYERS
            for cls in CLASSES
        },
        **{
            f"{name}, {cls.__name__}": (lambda call=call, cls=cls: call(cls), error, words)
            for cls in CLASSES
            for name, (call, error, words) in {
                "places first": (
                    lambda cls: FIRST(make(cls).transpose(0, 1)),
                    NotImplementedError,
                    r"gru: a layer with batch_first=True takes \[B, T, C\], got rows \[T, B, C\]; write "
                    r"x.transpose\(0, 1\)",
                ),
                "no mask that is causal": (
                    lambda cls: attend_itself(cls, is_causal=True),
                    ValueError,
                    r"multi_head_attention_forward: is_causal only describes attn_mask; pass",
                ),
                "entries of another size": (
                    lambda cls: attend_itself(cls, nn.MultiheadAttention(6, 2, batch_first=True)),
                    ValueError,
                    rf"multi_head_attention_forward: expected entries of 6 features, got a {cls.__name__}{SIZE}",
                ),
            }.items()
        },
        "rows that are turned": (
            lambda: FIRST(TURNED),
            r"gru: expected rows of entries \[B, T, C\], ragged along 1, got a JaggedTensor of size .*, ragged along 2",
        ),
        "ragged states": (
            lambda: FIRST(jagged(), STATES),
            r"gru: expected dense states hx \[layers, B, H\], got a JaggedTensor of size \(1, 3, 5\), ragged along 1",
        ),
    }
)
test_what_is_advised_of_layers_works = working(
    {
        **{
            f"{layer.__name__}, {cls.__name__}": lambda layer=layer, cls=cls: layer(4, 5, batch_first=True)(
                make(cls)
            )
            for layer in LAYERS
            for cls in CLASSES
        },
        **{
            f"a mask, {cls.__name__}": lambda cls=cls: attend_itself(cls, is_causal=True, attn_mask=CAUSAL)
            for cls in CLASSES
        },
        "dense states": lambda: FIRST(jagged(), torch.zeros(1, 3, 5)),
    }
)


def test_a_recurrent_layer_is_no_part_of_a_graph():
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(FIRST, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"gru: the kernel needs the lengths .* leave .*allow_rnn False"):
            compiled(jagged())  # by way of Dynamo's own
    torch.compiler.reset()
    assert torch.compile(FIRST, backend="eager")(jagged())[0].shape == (3, 3, 5)


def test_a_cache_of_ragged_keys_has_no_length():
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    keys, cache = jagged(8).unflatten(-1, (2, 4)).transpose(1, 2), transformers.DynamicCache()
    cache.update(keys, keys, 0)
    text = r"get_seq_length: a cache with a JaggedTensor of size .* as its keys has no single length, .* pass whole"
    with pytest.raises(NotImplementedError, match=text):
        cache.get_seq_length()


# ---- rules and dimensions ----------------------------------------------------------------------------------------


def test_the_order_in_which_rules_are_registered_has_no_meaning():
    """No function gets a rule from two others whose twin it is, and none has two of its own."""
    for merging in (register.jagged_merging, register.padded_merging):
        entries = [entry for module in (*register.BOTH, merging) for entry in module.RULES.entries]
        named = [op for ops, _ in entries for op in ops]
        assert len(named) == len({id(op) for op in named})
        implied = defaultdict(set)
        for ops, rule in entries:
            for twin in (t for op in ops if callable(op) for t in twins(op)):
                implied[twin].add(rule)
        assert not [twin for twin, rules in implied.items() if len(rules) > 1 and twin not in named]


def test_the_rules_pass_the_checks_of_implements():
    """They are registered without these checks, so that an import does not make them."""
    both = {JaggedTensor: register.jagged_merging, PaddedTensor: register.padded_merging}
    cases = [(cls, module) for cls, merging in both.items() for module in (*register.BOTH, merging)]
    cases += [(register.time_major.TimeMajor, module) for module in (register.multi_head, register.recurrent)]
    entries = [(cls, *entry) for cls, module in cases for entry in module.RULES.entries]
    assert len(entries) > 200
    for cls, ops, rule in entries:
        for op in ops:
            check_key(cls, op)
        check_rule(cls, ops, rule)


OUT_OF_RANGE = {
    "diff": lambda x, d: x.diff(dim=d),
    "flatten": lambda x, d: x.flatten(0, d),
    "flatten, start": lambda x, d: x.flatten(d, 1),
    "unflatten": lambda x, d: x.unflatten(d, (1, -1)),
    "transpose": lambda x, d: x.transpose(0, d),
    "swapaxes": lambda x, d: x.swapaxes(d, 1),
    "sum": lambda x, d: x.sum(d),
    "tensor_split": lambda x, d: x.tensor_split(2, d),
}


test_dimensions_that_are_none = raising(
    {
        f"{name}, {dim}, {cls.__name__}": (
            lambda call=call, dim=dim, cls=cls: call(
                torch.ones(2, 3)
                if cls is torch.Tensor
                else cls.from_tensors([torch.arange(3.0), torch.ones(1)]),
                dim,
            ),
            IndexError,
            "imension",
        )
        for name, call in OUT_OF_RANGE.items()
        for dim in (2, 3, -3)
        for cls in (torch.Tensor, *CLASSES)
    }
)


def of_no_dimension(cls, reduced, dtype):
    rows = [torch.tensor([0, 1, 2]).to(dtype), torch.tensor([0]).to(dtype)]
    return reduced(cls.from_tensors(rows), ()), [reduced(row, ()) for row in rows]


test_any_and_all_of_no_dimension_keep_the_rows = same(
    {
        f"{f.__name__}, {dtype}": lambda cls, f=f, dtype=dtype: of_no_dimension(cls, f, dtype)
        for f in (torch.any, torch.all)
        for dtype in (torch.float32, torch.uint8, torch.bool)
    },
    *CLASSES,
)
