"""The four-bit weights, with a kernel and without: products are those of the unpacked matrix, scales train."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import desugar
from classes import int4_kernel as example
from classes.int4_kernel import KernelInt4Weight
from classes.int4_weight import Int4Weight
from subclasses import DispatchError, strict
from subclasses.testing import check, suite
from tests.examples.classes.checks import check_gradients, converted, refused

X = torch.linspace(-1, 1, 24).view(3, 8)


def make(cls=Int4Weight, rows=4, group=4):
    return cls.from_float(torch.randn(rows, 8), group)


def suite_of(cls, **options):
    return suite(
        partial(make, cls),
        ops={F.linear: lambda x: (X, x)},
        sizes=[partial(make, cls, n) for n in (5, 7)],
        **options,
    )


MAKES = [make, partial(make, KernelInt4Weight)]
TestInt4Weight = suite_of(Int4Weight, variants=[partial(make, group=n) for n in (2, 8)])
TestKernelInt4Weight = suite_of(KernelInt4Weight)
test_dtypes = converted(
    MAKES,
    [torch.float16, torch.bfloat16, torch.float64],
    lambda w: [w.materialize(), F.linear(X.to(w.dtype), w), F.linear(X.to(w.dtype), w.float())],
)
THREE_SCALES = torch.ones(4, 3)
test_what_is_refused = refused(
    MAKES,
    {
        "other groups": (
            ValueError,
            "an even group that divides the row",
            [lambda w: make(type(w), group=3), lambda w: make(type(w), group=16)],
        ),
        "other scales": (
            ValueError,
            r"scales of size \[4, 3\]( for groups of 4 in 4 x 8)?",
            [lambda w: type(w)(w.packed, THREE_SCALES, **{"group": 4} if type(w) is Int4Weight else {})],
        ),
        "writes": (
            DispatchError,
            None,
            [lambda w: w.mul_(2), lambda w: w.__isub__(1), lambda w: w.copy_(torch.zeros(4, 8))],
        ),
        # The second has as many numbers as three rows.
        "an input of another length": (
            RuntimeError,
            "unflatten|cannot be multiplied",
            [lambda w: F.linear(torch.ones(3, 7), w), lambda w: F.linear(torch.ones(4, 6), w)],
        ),
    },
)


@pytest.fixture(params=[Int4Weight, KernelInt4Weight], ids=["in torch", "kernel"])
def cls(request):
    return request.param


@pytest.mark.slow
def test_the_op_is_well_formed():
    w = make(KernelInt4Weight)
    x, scale = torch.randn(3, 2, 4, requires_grad=True), w.scale.clone().requires_grad_()
    torch.library.opcheck(example.int4_linear, (x, w.packed, scale))
    doubles = [t.detach().double().requires_grad_() for t in (x, scale)]
    assert torch.autograd.gradcheck(lambda x, scale: example.int4_linear(x, w.packed, scale), doubles)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("size", [(8,), (3, 8), (2, 3, 8), (0, 8), (1, 8)], ids=str)
def test_values_and_gradients(cls, way, size):
    w = make(cls)
    leaves = [t.requires_grad_() for t in (torch.randn(size), w.scale.clone(), torch.randn(4))]
    numbers = w.materialize() / w.scale.repeat_interleave(4, 1)

    def layer(x, scale, bias):
        return F.linear(x, cls(w.packed, scale, **{"group": 4} if cls is Int4Weight else {}), bias).tanh()

    expected = F.linear(leaves[0], numbers * leaves[1].repeat_interleave(4, 1), leaves[2]).tanh()
    check_gradients(way(layer)(*leaves), expected, leaves)


def test_the_matrix_is_that_of_the_nearest_numbers(cls):
    numbers = torch.arange(-7, 8).tile(2)[:28].view(2, 14)
    numbers[:, 0] = 7
    w = cls.from_float(numbers.double() * 0.5, 14)
    assert w.packed.numel() == 14 and w.scale.tolist() == [[0.5], [0.5]]
    assert torch.equal(w.materialize(), numbers * 0.5)
    torch.testing.assert_close(2 / (w + 9), 2 / (numbers.double() * 0.5 + 9))


def test_the_least_number():
    w = Int4Weight(torch.tensor([[0x0F]], dtype=torch.uint8), torch.ones(1, 1), group=2)
    assert w.materialize().tolist() == [[7, -8]]


def test_a_compiled_weight_is_an_argument(cls, way):
    w = make(cls)
    with strict():  # no op of the layer makes the matrix by the fallback
        got = way(lambda x, w: F.linear(x, w).relu())(X, w)
    torch.testing.assert_close(got, F.linear(X, w.materialize()).relu())


def test_compiled_code_holds_one_node_for_the_kernel():
    layer = desugar.compile(lambda x, w: F.linear(x, w), backend="eager")
    layer(X, make(KernelInt4Weight))
    code = layer.programs[0].forward.code
    assert code.count("gallery.int4_linear.default(") == 1 and "bitwise_and" not in code


def test_a_module_loads_saves_and_trains_its_bias(tmp_path):
    layer, other = nn.Linear(8, 4), nn.Linear(8, 4)
    layer.weight = nn.Parameter(make(), requires_grad=False)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), assign=True)
    torch.testing.assert_close(other(X), layer(X))
    layer(X).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 3.0))


@pytest.mark.slow
def test_bfloat16():
    check(lambda: make().bfloat16(), paths={}, rtol=0.05, atol=0.05)


def test_no_rows_zeros_and_one_group(cls):
    assert F.linear(X, cls.from_float(torch.zeros(0, 8), 4)).shape == (3, 0)
    assert not F.linear(X, cls.from_float(torch.zeros(2, 8), 8)).any()
    assert Int4Weight.from_float(torch.zeros(2, 0), 4).materialize().shape == (2, 0)
