"""Padded tensors: making, converting, refusing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.judge import LENGTHS, PLACES, Table, check_parts, make_table, refused
from tests.tables import giving

# ---- making and converting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "width"), [({}, 5), ({"multiple": 4}, 8), ({"buckets": [16, 4, 6]}, 6), ({"multiple": 5}, 5)]
)
def test_from_tensors(options, width):
    rows = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in LENGTHS]
    x = PaddedTensor.from_tensors(rows, **options)
    assert x.shape == (4, width, 2) and x.row_lengths().tolist() == LENGTHS
    torch.testing.assert_close(x.to_tensors(), rows)
    weights = torch.randn(4, width, 2, dtype=torch.float64)
    grads = torch.autograd.grad((x.to_dense() * weights).sum(), rows)
    torch.testing.assert_close(grads, tuple(w[:n] for w, n in zip(weights, LENGTHS, strict=True)))


@pytest.mark.parametrize(("dim", "batch"), [(0, 1), (1, 0), (-1, 0)])
def test_pad(dim, batch):
    plain = torch.randn(3, 5, 6, requires_grad=True)
    x = PaddedTensor.pad(plain, dim=dim, multiple=4)
    place = dim % 3
    assert x.shape[place] == -(-plain.shape[dim] // 4) * 4 and x.batch_dim == batch and x.ragged_dim == place
    assert x.row_lengths().tolist() == [plain.shape[dim]] * plain.shape[batch]
    torch.testing.assert_close(torch.stack(x.to_tensors(), batch), plain)
    assert (torch.autograd.grad(x.sum(), plain)[0] == 1).all()


@pytest.mark.parametrize("places", PLACES)
def test_round_trips(places):
    table = make_table(places)
    check_parts(table, table.x, table.rows)
    check_parts(table, table.x.to_padded(multiple=8), table.rows)
    assert table.x.to_padded(multiple=8).shape[table.ragged_dim] == 8
    check_parts(table, table.x.to_jagged().to_tensors(), table.rows)
    check_parts(table, table.x.to_jagged().to_padded(multiple=16), table.rows)
    mask = table.x.mask()
    assert mask.shape == (4, 7) and mask.sum(1).tolist() == LENGTHS
    dense = table.x.to_dense(fill=9.0)
    assert not dense.isnan().any() and int((dense == 9).sum()) == int((~mask).sum()) * 4
    assert torch.autograd.gradcheck(lambda t: Table(t, table.lengths, table.batch_dim, table.ragged_dim).x.to_dense(),
                                    [torch.nan_to_num(table.leaf.detach()).requires_grad_()])  # fmt: skip


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.detach(),
        lambda x: x.clone(),
        torch.zeros_like,
        lambda x: x.to(torch.float32),
        lambda x: x.float().double(),
        lambda x: x.contiguous(),
    ],
)
def test_copies_keep_the_lengths(copy):
    x = make_table().x
    assert copy(x).lengths is x.lengths and copy(x).shape == x.shape


NO_ROWS = PaddedTensor(torch.ones(0, 4, 2), torch.zeros(0, dtype=torch.int64))
NO_ENTRIES = PaddedTensor(torch.ones(2, 0, 3), torch.zeros(2, dtype=torch.int64))

test_no_rows_and_no_entries = giving(
    {
        "a sum of no rows": (lambda: (NO_ROWS * 2).sum(), 0),
        "sums of no rows": (lambda: NO_ROWS.sum(1).shape, (0, 2)),
        "no rows as tensors": (lambda: NO_ROWS.to_tensors(), []),
        "a sum of no entries": (lambda: NO_ENTRIES.sum(), 0),
        "a mean of no entries": (lambda: NO_ENTRIES.mean().isnan(), True),
        "softmax of no entries": (lambda: NO_ENTRIES.softmax(1).shape, (2, 0, 3)),
        "a multiple of nothing": (
            lambda: PaddedTensor.from_tensors([torch.ones(0)], multiple=8).shape,
            (1, 8),
        ),
    }
)


# ---- refusing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t, n: PaddedTensor(t, n[:1]), r"expected shape \[2\]"),
        (lambda t, n: PaddedTensor(t, n, ragged_dim=0), "both 0"),
        (lambda t, n: PaddedTensor(t, n, ragged_dim=3), "ragged_dim"),
        (lambda t, n: PaddedTensor(t, n, batch_dim="x"), "batch_dim"),
        (lambda t, n: PaddedTensor(t, n + 9).to_tensors(), "from 0 to 4"),
        (lambda t, n: PaddedTensor.from_tensors([]), "at least one row"),
        (lambda t, n: PaddedTensor.from_tensors([t, t[:, :1]]), "row 1"),
        (lambda t, n: PaddedTensor.from_tensors([t], multiple=2, buckets=[2]), "both"),
        (lambda t, n: PaddedTensor.from_tensors([t], buckets=[1]), "none of"),
        (lambda t, n: PaddedTensor.from_tensors([t], multiple=0), "at least 1"),
        (lambda t, n: PaddedTensor.pad(t[0, 0], dim=0), "two dimensions"),
        (lambda t, n: PaddedTensor.pad(t, dim=3), "expected a dimension"),
        (lambda t, n: PaddedTensor(t, n.int()), r"lengths: expected dtype torch\.int64"),
        (lambda t, n: PaddedTensor(t, [1, 2]), "lengths"),
        (lambda t, n: PaddedTensor.from_tensors(t), "list of tensors"),
    ],
)
def test_wrong_parts(make, words):
    error = TypeError if words in ("lengths", "list of tensors") else ValueError
    with pytest.raises(error, match=words):
        make(torch.ones(2, 4, 3), torch.tensor([1, 2]))


REFUSED = [
    lambda x: x.unsqueeze(-1) @ x.unsqueeze(1).expand(-1, 1, -1, -1),
    lambda x: x.transpose(0, 1).flatten(0, 1),
    lambda x: x.flatten(0, 2),
    lambda x: x.flatten(0, 1).sort(0),
    lambda x: x.flatten(0, 1).argmax(0),
    lambda x: x.unfold(0, 2, 1),
    lambda x: torch.cat([x, x.transpose(0, 1)], 0),
    lambda x: torch.cat([x, x[:2]], 1),
    lambda x: x.expand(4, 9, 4),
    lambda x: torch.ones(4, 7, 4, dtype=torch.float64).add_(x),
    lambda x: F.layer_norm(x.transpose(1, 2), (7,)),
    lambda x: F.linear(x.mT, torch.ones(2, 7, dtype=torch.float64)),
    lambda x: F.cross_entropy(x, torch.zeros(4, 7, dtype=torch.int64)),
    lambda x: torch.ones(2, 4, 7, dtype=torch.float64) @ x,
    lambda x: x.argmax(),
    lambda x: x + x.to_jagged(),
]
ADVICE = r"no rule for aten\.mode.*use x\.to_dense\(fill\)"

test_what_has_no_rule_is_refused = refused(
    {f"{n}": (f, (DispatchError, ValueError), r"Padded|lengths") for n, f in enumerate(REFUSED)}
    | {"mode": (lambda x: x.mode(), DispatchError, ADVICE)},
    ["padded"],
)
