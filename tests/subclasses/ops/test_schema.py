"""What schemas say, read as the plans need it."""

from __future__ import annotations

import pytest
import torch

from subclasses._torch import all_aten_ops
from subclasses.autograd.python_functions import python_functions, tagged_functions, twins
from subclasses.dispatch.views import VIEW_NAMES, view_functions
from subclasses.ops.schema import functional_counterpart, op_facts

aten = torch.ops.aten


def test_a_functional_op():
    facts = op_facts(aten.add.Tensor)
    assert [(a.name, a.kind, a.keyword) for a in facts.arguments] == [
        ("self", "tensor", False),
        ("other", "tensor", False),
        ("alpha", "other", True),
    ]
    assert facts.functional and facts.returns == ("tensor",)


@pytest.mark.parametrize(
    ("op", "written", "returned"),
    [
        (aten.add_.Tensor, (0,), (0,)),
        (aten.add.out, (3,), (3,)),
        (aten.aminmax.out, (3, 4), (3, 4)),
        (aten._foreach_add_.Scalar, (0,), ()),
        (aten.native_batch_norm.default, (), (None, None, None)),
    ],
)
def test_writes(op, written, returned):
    facts = op_facts(op)
    assert (facts.written, facts.returned) == (written, returned)


@pytest.mark.parametrize(
    ("op", "viewed"),
    [
        (aten.view.default, ((0, 0),)),
        (aten.split.Tensor, ((0, 0),)),
        (aten.unbind.int, ((0, 0),)),
        (aten.add_.Tensor, ()),
        (aten.cos.default, ()),
    ],
)
def test_views(op, viewed):
    assert op_facts(op).viewed == viewed


def test_metadata_mutation_is_told_by_its_tag():
    assert op_facts(aten.t_.default).changes_metadata and not op_facts(aten.add_.Tensor).changes_metadata


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.add.out, aten.add.Tensor),
        (aten.aminmax.out, aten.aminmax.default),
        (aten.add.Tensor, None),
        (aten.t_.default, None),
        (aten.view.default, None),
    ],
)
def test_counterparts(op, expected):
    assert functional_counterpart(op) is expected


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


@pytest.mark.parametrize(
    "function", [torch.linalg.diagonal, torch.linalg.norm, torch.linalg.qr, torch.linalg.cross]
)
def test_functions_of_linalg_with_other_defaults_are_no_twins(function):
    assert getattr(torch, function.__name__.removeprefix("linalg_")) not in twins(function)


def test_where_has_no_twin_for_its_arguments_stand_in_another_order():
    assert torch.Tensor.where not in twins(torch.where)


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
