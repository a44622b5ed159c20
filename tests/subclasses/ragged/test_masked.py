"""``torch.masked`` on ragged tensors, with a loop over the rows as judge."""

from __future__ import annotations

import pytest
import torch

from subclasses import DispatchError
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    WAYS,
    along,
    classes,
    eager,
    judged,
    pairs_of,
    stock,
    ways,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

LENGTHS = [3, 5, 1]
COUNTING = {name: getattr(torch.masked, name) for name in ("mean", "var", "std")}
OTHERS = {name: getattr(torch.masked, name) for name in ("sum", "prod", "amax", "amin", "logsumexp")}
PLACES = {name: getattr(torch.masked, name) for name in ("argmax", "argmin")}
ALONG = {
    name: getattr(torch.masked, name) for name in ("softmax", "log_softmax", "softmin", "cumsum", "cumprod")
}
MASK = (torch.arange(3 * 5 * 4).view(3, 5, 4) * 7 % 5) > 0
PARTS = {"": lambda m: m, "broadcast, ": lambda m: m[:1, :, :1]}


def all_entries(x):
    """A mask of the entries that exist."""
    return torch.ones_like(x, dtype=torch.bool)


# A mean, a variance and a deviation count entries, so their mask is that of the entries.
test_what_counts = judged(
    {
        name: (lambda x, f=f: f(x, 1, mask=all_entries(x)), lambda row, _, f=f: f(row, 0))
        for name, f in COUNTING.items()
    }
    | {
        f"{name} of all": (
            lambda x, f=f: f(x, (1, 2), keepdim=True, mask=all_entries(x))[:, 0],
            lambda row, _, f=f: f(row, (0, 1), keepdim=True)[0],
        )
        for name, f in COUNTING.items()
    },
    [pair for pair in pairs_of(LAYOUTS, WAYS) if pair != ("padded", stock)],
    sweep=36,
    lengths=LENGTHS,
)
test_with_a_mask = judged(
    {
        name: (lambda x, f=f: f(x, -2, mask=x > 0), lambda row, _, f=f: f(row, 0, mask=row > 0))
        for name, f in (COUNTING | OTHERS).items()
    }
    | {
        name: (
            lambda x, f=f: f(x.detach(), -2, mask=x > 0),
            lambda row, _, f=f: f(row.detach(), 0, mask=row > 0),
        )
        for name, f in PLACES.items()
    },
    lengths=LENGTHS,
)
test_a_dense_mask_joined_with_that_of_the_entries = judged(
    {
        f"{what}{name}": (
            lambda x, f=f, part=part: f(x, 1, mask=all_entries(x) & part(MASK)),
            lambda row, i, f=f, part=part: f(row, 0, mask=part(MASK).expand(3, 5, -1)[i, : len(row)]),
        )
        for name, f in COUNTING.items()
        for what, part in PARTS.items()
    },
    lengths=LENGTHS,
    width=5,
)
test_along = judged({name: along(f) for name, f in ALONG.items()}, lengths=LENGTHS)


@pytest.mark.sweep(12)
@ways
@classes
@pytest.mark.parametrize(
    "mask",
    [None, torch.ones(3, 5, 4, dtype=torch.bool), torch.ones(5, 1) > 0],
    ids=["none", "dense", "broadcast"],
)
@pytest.mark.parametrize("name", COUNTING)
def test_what_would_count_the_padding_is_refused(name, mask, cls, way):
    x = cls.from_tensors([torch.ones(n, 4) for n in LENGTHS])
    text = rf"torch\.masked\.{name} of a {cls.__name__} would count(.|\n)*write x\.{name}"
    with pytest.raises(DispatchError if way is eager else Exception, match=text):
        way(lambda x: COUNTING[name](x, 1, mask=mask))(x)


@ways
@classes
def test_the_layout_can_be_asked_for(cls, way):
    x = cls.from_tensors([torch.ones(n) for n in LENGTHS])
    assert way(lambda x: x * 2 if x.layout == torch.strided else x)(x).sum() == 2 * sum(LENGTHS)


@classes
@pytest.mark.parametrize(
    "options", [{}, {"unbiased": False}, {"correction": 0}, {"dtype": torch.float64}], ids=str
)
@pytest.mark.parametrize("name", COUNTING)
def test_dtypes_and_corrections(name, options, cls):
    rows, f = [torch.tensor([1, 2, 6]), torch.tensor([4, 7])], COUNTING[name]
    x, options = cls.from_tensors(rows), {"dtype": torch.float64} if name == "mean" else options
    expected = torch.stack([f(row, 0, **options) for row in rows])
    torch.testing.assert_close(f(x, 1, mask=all_entries(x), **options), expected)
