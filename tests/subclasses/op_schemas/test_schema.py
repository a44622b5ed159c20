"""The facts that plans read from schemas."""

import pytest
import torch

from subclasses._torch import all_aten_ops
from subclasses.autograd.python_functions import python_functions, tagged_functions, twins
from subclasses.dispatch.views import VIEW_NAMES, view_functions
from subclasses.op_schemas.schema import functional_counterpart, op_facts
from tests.tables import giving

aten = torch.ops.aten


def facts_of(op, *names):
    facts = op_facts(op)
    return [getattr(facts, name) for name in names]


WRITES = {
    aten.add_.Tensor: [(0,), (0,)],
    aten.add.out: [(3,), (3,)],
    aten.aminmax.out: [(3, 4), (3, 4)],
    aten._foreach_add_.Scalar: [(0,), ()],
    aten.native_batch_norm.default: [(), (None, None, None)],
}
VIEWS = {
    aten.view.default: ((0, 0),),
    aten.split.Tensor: ((0, 0),),
    aten.unbind.int: ((0, 0),),
    aten.add_.Tensor: (),
    aten.cos.default: (),
}
COUNTERPARTS = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.add.out: aten.add.Tensor,
    aten.aminmax.out: aten.aminmax.default,
    aten.add.Tensor: None,
    aten.t_.default: None,
    aten.view.default: None,
}
test_facts_of_ops = giving(
    {
        "the arguments of a functional op": (
            lambda: [(a.name, a.role, a.keyword) for a in op_facts(aten.add.Tensor).arguments],
            [("self", "tensor", False), ("other", "tensor", False), ("alpha", "other", True)],
        ),
        "a functional op": (
            lambda: facts_of(aten.add.Tensor, "functional", "returns"),
            [True, ("tensor",)],
        ),
        "metadata mutation is told by its tag": (
            lambda: [op_facts(op).changes_metadata for op in (aten.t_.default, aten.add_.Tensor)],
            [True, False],
        ),
        **{
            f"writes of {op}": (lambda op=op: facts_of(op, "written", "returned"), expected)
            for op, expected in WRITES.items()
        },
        **{f"views of {op}": (lambda op=op: op_facts(op).viewed, expected) for op, expected in VIEWS.items()},
        **{
            f"the counterpart of {op}": (lambda op=op: functional_counterpart(op), expected)
            for op, expected in COUNTERPARTS.items()
        },
    }
)


@pytest.mark.slow
def test_a_counterpart_never_writes():
    for op in all_aten_ops():
        found = functional_counterpart(op)
        assert found is None or op_facts(found).written == ()


# ---- Python-level functions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "twin"),
    [
        (torch.sum, torch.Tensor.sum),
        (torch.clip, torch.clamp),
        (torch.Tensor.clip, torch.clamp),
        (torch.concat, torch.cat),
        (torch.inverse, torch.linalg.inv),
        (torch.Tensor.det, torch.linalg.det),
        (torch.sigmoid, torch.special.expit),
        (torch.special.psi, torch.digamma),
        (torch.special.softmax, torch.Tensor.softmax),
        (torch.swapdims, torch.swapaxes),
        (torch.moveaxis, torch.Tensor.movedim),
        (torch.fix, torch.trunc),
        (torch.ger, torch.outer),
        (torch.arctan2, torch.atan2),
    ],
)
def test_twins(function, twin):
    assert twin in twins(function) and function in twins(twin) and function not in twins(function)


LINALG = [torch.linalg.diagonal, torch.linalg.norm, torch.linalg.qr, torch.linalg.cross]
test_what_is_no_twin = giving(
    {
        "functions of linalg with other defaults": (
            lambda: [getattr(torch, f.__name__.removeprefix("linalg_")) in twins(f) for f in LINALG],
            [False] * 4,
        ),
        "where, whose arguments stand in another order": (
            lambda: torch.Tensor.where in twins(torch.where),
            False,
        ),
    }
)


def test_functions_of_a_composite_op():
    assert torch.nn.functional.linear in python_functions(aten.linear.default)
    assert {torch.matmul, torch.Tensor.matmul} <= set(python_functions(aten.matmul.default))
    assert torch.linalg.norm in python_functions(aten.linalg_norm.default)


# Views whose functions keep a value's structure or belong to other layouts than strided.
NO_PLAIN_VIEW = set(
    """alias as_tensor ccol_indices coalesce col_indices contiguous cpu crow_indices cuda detach indices pin_memory
    positive resolve_conj resolve_neg row_indices slice_inverse to values""".split()
)


def test_no_view_function_is_missing():
    named = {op.overloadpacket.__name__ for op in all_aten_ops() if op_facts(op).viewed}
    public = {n for n in named if not n.startswith("_") and (hasattr(torch, n) or hasattr(torch.Tensor, n))}
    assert public - NO_PLAIN_VIEW <= VIEW_NAMES
    assert torch.Tensor.T.__get__ in view_functions and torch.split in view_functions


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tag", [torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.inplace_view])
def test_functions_of_a_tag_are_those_of_all_its_ops(tag):
    expected = [f for op in all_aten_ops() if tag in op.tags for f in python_functions(op)]
    assert tagged_functions(tag) == tuple(dict.fromkeys(expected))
    assert expected
