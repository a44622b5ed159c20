"""Calls that the author passes as ``ops=``: of arguments that no tensor of the size takes, and that read fields."""

from __future__ import annotations

import pytest
import torch

from subclasses import Outer, inner
from subclasses.testing import examine
from tests.subclasses.subjects import declare
from tests.subclasses.testing.faults import finding, of_tensors, outcome, ruled

POINTS = torch.rand(3, 2, 4)


# Maps x to matrix @ x + offset; shown as one matrix with a column more.
Affine = declare(
    matrix=inner(shape="... n n"),
    offset=inner(shape="... n"),
    outer=staticmethod(lambda matrix: Outer((*matrix.shape[:-1], matrix.shape[-1] + 1))),
)


def products(product):
    cls = ruled(Affine, {torch.matmul: lambda func, x, points: product(x, points)})
    return of_tensors(cls, (3, 2, 2), (3, 2))


RIGHT = products(lambda x, points: x.unwrap("matrix") @ points + x.unwrap("offset").unsqueeze(-1))
WRONG = {
    "raw": lambda x, points: x.unwrap("matrix") @ points + x.offset.unsqueeze(-1),
    "detached": lambda x, points: x.unwrap("matrix").detach() @ points + x.unwrap("offset").unsqueeze(-1),
}
test_gradients_of_a_call_that_no_tensor_of_the_size_takes = pytest.mark.sweep(2)(
    finding(
        {
            name: (
                "inner_gradients",
                products(wrong),
                ["matmul"],
                RIGHT,
                {"ops": {torch.matmul: lambda x: (x, POINTS)}},
            )
            for name, wrong in WRONG.items()
        }
    )
)


Counts = declare(
    keywords={"fallback": "views"},
    rules={torch.quantile: lambda func, x, level: func(x.unwrap("held"), level)},
)


def level_of(x):
    return x, 0.5 * x.held.numel() / 15


@pytest.mark.sweep(4)
@pytest.mark.parametrize("arguments", [level_of, lambda x: (x, 0.5 * x.held.numel() / 15)])
@pytest.mark.parametrize("reference", [None, lambda x: x.held])
def test_arguments_that_read_fields(arguments, reference):
    options = {"reference": reference} if reference else {}
    report = examine(lambda: Counts(torch.rand(3, 5)), paths={}, ops={torch.quantile: arguments}, **options)
    assert not report.broken, report.details()


def test_arguments_that_cannot_be_made():
    ops = {torch.quantile: lambda x: (x, x.held.absent)}
    found = outcome(lambda: Counts(torch.rand(3, 5)), "values", ops=ops, reference=lambda x: x.held)
    assert found.state == "broken" and "quantile raised AttributeError" in found.detail
    assert "<lambda>" not in found.mend
