"""Medians, quantiles and the k-th of what exists, with a loop over the rows (or the positions) as judge."""

from __future__ import annotations

import pytest
import torch

from tests.subclasses.ragged.judge import (
    LAYOUTS,
    along,
    check_parts,
    desugared,
    eager,
    judged,
    layouts,
    make,
    pairs_of,
    refused,
)

LENGTHS = [3, 2, 5, 1]
SEVERAL = torch.tensor([0.1, 0.2], dtype=torch.float64)

STATISTICS = {
    "median": lambda t, d: t.median(d).values,
    "nanmedian": lambda t, d: t.nanmedian(d).values,
    "kthvalue": lambda t, d: t.kthvalue(1, d).values,
    "quantile": lambda t, d: t.quantile(0.3, d),
    "nanquantile": lambda t, d: t.nanquantile(0.7, d, interpolation="lower"),
    "midpoint": lambda t, d: t.quantile(0.4, d, interpolation="midpoint"),
    "nearest": lambda t, d: t.quantile(0.5, d, interpolation="nearest"),
    "higher": lambda t, d: t.quantile(torch.tensor(0.2, dtype=torch.float64), d, interpolation="higher"),
    "masked.median": torch.masked.median,
    "median, keepdim": lambda t, d: t.median(d, keepdim=True).values,
    "kthvalue, keepdim": lambda t, d: t.kthvalue(1, d, True).values,
    "quantile, keepdim": lambda t, d: t.quantile(0.5, d, keepdim=True),
    "place of median": lambda t, d: t.median(d).indices,
    "place of the first": lambda t, d: t.kthvalue(1, d).indices,
}
OF_ALL = {f.__name__: f for f in (torch.median, torch.nanmedian)}


test_of_rows = judged(
    {name: along(f) for name, f in STATISTICS.items()},
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=72,
    lengths=LENGTHS,
)
test_of_entries = judged({name: along(f, -1) for name, f in STATISTICS.items()}, lengths=LENGTHS)
test_of_all = judged(
    {name: (f, f) for name, f in OF_ALL.items()}
    | {
        "nanmedian beside NaN": (lambda t: t.log().nanmedian(),) * 2,
        "median of NaN": (lambda t: t.detach().log().median(),) * 2,
    }
    | {"of integers": (lambda t: (t.detach() * 10).nan_to_num(1000).long().median(),) * 2},
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=6,
    whole=True,
)


@layouts
@pytest.mark.parametrize("name", STATISTICS)
def test_of_positions(name, layout):
    f, batch = STATISTICS[name], make(layout, [5, 5, 2], width=5)
    expected = [f(torch.stack([row[t] for row in batch.rows if len(row) > t]), 0) for t in range(5)]
    check_parts(batch, [f(batch.x, 0)], [torch.stack(expected, 1 if "keepdim" in name else 0)])


@layouts
@pytest.mark.parametrize("name", ["median", "nanmedian", "kthvalue", "quantile", "nanquantile"])
def test_nans_that_exist(name, layout):
    f, batch = STATISTICS[name], make(layout, LENGTHS)
    with torch.no_grad():
        for row in batch.rows:
            row[0, :2] = torch.nan
    torch.testing.assert_close(f(batch.x, 1), torch.stack([f(row, 0) for row in batch.rows]), equal_nan=True)


test_what_is_refused = refused(
    {
        "a median of nothing": (lambda x: x[:, 1:].median(1), (IndexError, RuntimeError), "no entries"),
        "k beyond a row": (lambda x: x.kthvalue(2, 1), RuntimeError, "fewer than k=2"),
        "k of 0": (lambda x: x.kthvalue(0, 1), IndexError, "k of at least 1"),
        "several quantiles": (
            lambda x: x.quantile(SEVERAL, 1),
            NotImplementedError,
            "expected one q and a dim",
        ),
        "no quantile": (lambda x: x.quantile(2.0, 1), RuntimeError, "between 0 and 1"),
    },
    lengths=LENGTHS,
)
