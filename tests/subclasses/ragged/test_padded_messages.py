"""What is refused of padded rows, and what is wrong in a file of them: the error says what came, and what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import raising, working

LENGTHS = (3, 1, 2)
NAME = r"a PaddedTensor of size \(3, 3, 4\), rows along 0, ragged along 1"
BATCH = r"; x.to_jagged\(\), or a batch that is not padded, has no such limit"


def padded(*width, lengths=LENGTHS, **options):
    return PaddedTensor.from_tensors([torch.randn(n, *(width or (4,))) for n in lengths], **options)


def batch():
    """Three rows, and one that the batch has not."""
    return padded(batch_multiple=4)


def merged():
    return padded().flatten(0, 1)


def places_first():
    return padded().transpose(0, 1)


def written(x, index, value):
    x[index] = value


ROWS, PLACES = torch.tensor([0, 2]), torch.tensor([0, 1])
MASK = torch.ones(3, 3, dtype=torch.bool)

REFUSED = {
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
        rf"where it has no entry: write y.to_dense\(\) for the one of a single row$",
    ),
    "a single row of another width": (
        lambda: padded() + padded(lengths=(2,)),
        r"write y.to_dense\(\) for the one of a single row, after x.to_padded\(at_least=3\) for both",
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
        r"writing into a PaddedTensor of size \(3, 4, 3\), .*: expected a number, or what x\[mask\] gives for a mask",
    ),
    "rows put": (
        lambda: padded().index_put((ROWS,), padded(lengths=(3, 2))),
        f"index_put: expected dense values for a padded tensor, got a PaddedTensor .* for {NAME}; write "
        rf"x\[index\] = values",
    ),
    "into merged rows": (
        lambda: merged().index_put((ROWS,), torch.zeros(4)),
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


test_refused = raising(REFUSED)


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


# ---- what the errors advise ------------------------------------------------------------------------------------

ADVICE = {
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
    "a mask of entries of two dimensions": lambda: (lambda x: x[x[..., 0, 0].like_dense(MASK)])(padded(2, 5)),
    "a mask of merged elements": lambda: (lambda x: x[x.like_dense(torch.ones(9, 4, dtype=torch.bool))])(
        merged()
    ),
    "a table of a single row": lambda: padded() + padded(lengths=(3,)).to_dense(),
    "a wider table of one": lambda: padded() + padded(lengths=(2,)).to_padded(at_least=3).to_dense(),
    "to_dense and unflatten": lambda: padded().to_dense().unflatten(1, (3, 1)),
    "unmerged rows put": lambda: merged().unflatten(0, (3, 3)).index_put((ROWS,), torch.zeros(4)),
    "rows written": lambda: written(padded(), ROWS, padded(lengths=(3, 2))),
    "dense values": lambda: padded().index_put((ROWS,), torch.zeros(2, 3, 4)),
    "index tensors for rows": lambda: places_first().index_put((PLACES[:, None], ROWS), torch.zeros(4)),
}


test_what_is_advised_works = working(ADVICE)


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


@pytest.mark.parametrize("name", WRONG)
def test_what_a_file_of_merged_rows_may_not_say(name):
    """A file says how a value is made again: with what, of which fields."""
    changed, text = WRONG[name]
    rebuild, (cls, inners, metadata, *rest) = batch().flatten(0, 1).__reduce_ex__(2)
    assert rebuild(cls, inners, metadata, *rest).ragged_dim == 0
    with pytest.raises(ValueError, match=text):
        rebuild(cls, inners | changed.get("inners", {}), metadata | changed.get("metadata", {}), *rest)
