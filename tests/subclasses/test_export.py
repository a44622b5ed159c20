"""Flattened values, and torch.export's graphs of declared classes."""

import io
import json

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from subclasses import Outer, TensorSubclass, export, inner, static
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.export.outcomes import check_same, quiet, reload
from tests.subclasses.subjects import FACTORIES, declare
from tests.tables import raising

Described = declare(
    name="Described",
    __module__=__name__,
    raw=inner(),
    what=static(default=None),
    keywords={"fallback": "map"},
)


class Applied(nn.Module):
    """A module that calls a function."""

    def __init__(self, fn, weight=None):
        super().__init__()
        self.fn, self.weight = fn, weight

    def forward(self, *args):
        return self.fn(*args) if self.weight is None else self.fn(self.weight, *args)


def rows(*lengths):
    return JaggedTensor.from_tensors([torch.randn(n, 4) for n in lengths])


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def export_flattened(fn, *args, strict=False):
    args = export.flatten(args)
    shapes = export.dynamic_shapes(args)
    with quiet():
        return torch.export.export(export.Flattened(fn), args, dynamic_shapes=shapes, strict=strict)


# ---- flattening --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_value_is_what_its_node_stands_for(kind):
    x = FACTORIES[kind]()
    node = export.flatten(x)
    leaves = pytree.tree_leaves(node)
    assert isinstance(node, export.InnerTensors) and not any(isinstance(t, TensorSubclass) for t in leaves)
    check_same(export.unflatten(node), x)


def test_the_rest_of_a_tree_stays_the_same():
    x, t = rows(2, 1), torch.ones(3)
    tree = export.flatten({"a": [x, t, 3], "b": (None, "text")})
    assert tree["a"][1] is t and tree["a"][2] == 3 and tree["b"] == (None, "text")
    assert repr(tree["a"][0]) == "InnerTensors(JaggedTensor, 3 tensors)"
    assert export.unflatten(tree)["a"][0]._layout is x._layout


def test_flattening_is_differentiable():
    values = torch.randn(3, 4, requires_grad=True)
    x = JaggedTensor.from_lengths(values, [2, 1])
    export.unflatten(export.flatten(x)).sum().backward()
    assert values.grad is not None and torch.equal(values.grad, torch.ones(3, 4))


def test_dims_that_a_class_marks_are_dynamic():
    t = torch.ones(5)
    torch._dynamo.maybe_mark_dynamic(t, 0)
    args = export.flatten((rows(2, 1), t, torch.ones(2), 3))
    any_size = {0: Dim.DYNAMIC}
    assert export.dynamic_shapes(args) == {"args": ([any_size] * 3, any_size, {}, None)}


# ---- recorded graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_the_graph_holds_plain_ops_alone(strict):
    program = export_flattened(lambda x: (x * 2).sum(1), rows(3, 1), strict=strict)
    nodes = [n for n in program.graph.nodes if n.op in ("placeholder", "call_function")]
    assert len(nodes) > 4
    assert not any(isinstance(n.meta.get("val"), TensorSubclass) for n in nodes)
    assert not any("subclass" in str(n.target) for n in nodes)


def test_an_exported_module_is_trained():
    module, x, y = model(), rows(3, 1, 2), rows(2, 5)
    program = export_flattened(module, x).module()
    export.unflatten(program(*export.flatten((y,)))).values.square().sum().backward()
    module(y).values.square().sum().backward()
    wanted = {f"fn.{name}": p.grad for name, p in module.named_parameters()}
    got = {name: p.grad for name, p in program.named_parameters()}
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("strict", [False, True])
def test_values_that_share_their_rows_may_differ_later(strict):
    x = rows(3, 1)
    same = JaggedTensor(x.values * 2, x.offsets)
    program = export_flattened(lambda x, y: x + y, x, same, strict=strict).module()
    y, z = rows(2, 3), rows(1, 4)
    check_same(export.unflatten(program(*export.flatten((y, y * 2)))), y * 3)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        program(*export.flatten((y, z)))  # whose rows do not match


def test_an_argument_that_is_not_flattened():
    def summed(x):
        return (x * 2).sum(1)

    with quiet():
        program = torch.export.export(Applied(summed), (rows(3, 1),)).module()
    x = rows(2, 5, 1)  # never flattened, and the guards of the program read its carrier
    check_same(program(x), summed(x))


# ---- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [None, True, 2, 0.5, "text", (1, ("a", torch.int8)), torch.device("cpu")])
def test_metadata_in_a_file(what):
    program = reload(export_flattened(lambda x: x + 1, Described(torch.ones(2), what=what)))
    y = export.unflatten(program.module()(*export.flatten((Described(torch.zeros(2), what=what),))))
    assert y.what == what and type(y.what) is type(what) and torch.equal(y.raw, torch.ones(2))
    with pytest.raises(ValueError, match="input tree spec"):
        program.module()(*export.flatten((Described(torch.zeros(2), what="other"),)))


def test_a_file_of_ragged_and_quantized_values():
    def fn(x, y, w):
        return x * 2, y + 1, w

    args = (
        rows(3, 1),
        PaddedTensor(torch.ones(2, 3), torch.tensor([1, 3])),
        Int8Tensor.from_float(torch.eye(4)),
    )
    program = reload(export_flattened(fn, *args)).module()
    check_same(export.unflatten(program(*export.flatten(args))), fn(*args))


# ---- errors ------------------------------------------------------------------------------------------------


OF_DESCRIBED = f"{Described.__module__}.Described"


UNWRITABLE = Described(torch.ones(2), what=frozenset({1}))
test_errors = raising(
    {
        **{
            f"a result that is a wrapper, strict={strict}": (
                lambda strict=strict: torch.export.export(
                    Applied(lambda x: Described(x * 2)), (torch.ones(2),), strict=strict
                ),
                r"(?s)(?=.*a Described)(?=.*return its inner tensors)(?=.*Flattened\(fn\))",
            )
            for strict in (False, True)
        },
        "metadata that no file holds": (
            lambda: torch.export.save(export_flattened(lambda x: x + 1, UNWRITABLE), io.BytesIO()),
            TypeError,
            r"a Described .* got frozenset\(\{1\}\) of type frozenset; .*desugar.save",
        ),
        "a class that is not there": (
            lambda: export._from_json(json.dumps(["elsewhere.Gone", ["raw"], []])),
            ValueError,
            r"takes or returns a elsewhere\.Gone, .* import it before",
        ),
        **{
            f"{value} as metadata": (
                lambda value=value: export._from_json(json.dumps([OF_DESCRIBED, ["raw"], [value]])),
                ValueError,
                r"expected metadata that torch.export.save wrote, got ",
            )
            for value in ({"dtype": "nn"}, {"other": 1}, [1])
        },
    }
)


# ---- Parameters --------------------------------------------------------------------------------------------


def by_factors(func, x, weight, bias=None):
    left, right = weight.unwrap()
    return func(func(x, right), left, bias)


Product = declare(
    name="Product",
    __module__=__name__,
    left=inner(),
    right=inner(differentiable=True),
    outer=staticmethod(lambda left, right: Outer((left.shape[0], right.shape[1]))),
    materialize=lambda self: self.left @ self.right,
    keywords={"fallback": "materialize", "trainable": True},
    rules={nn.functional.linear: by_factors},
)


class Materialized(nn.Linear):
    def forward(self, x):
        return x @ self.weight.materialize().mT + self.bias


class Reading(nn.Linear):
    """With a rule, without one, and by a field."""

    def forward(self, x):
        return (
            nn.functional.linear(x, self.weight, self.bias).sin()
            + (self.weight * 2).sum()
            + self.weight.right.sum()
        )


def gradients(module, x):
    """The gradients of two backwards; a program may share its parameters with the module."""
    module.zero_grad()
    for _ in range(2):
        module(x).square().sum().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("cls", [nn.Linear, Materialized, Reading])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("when", ["with gradients", "without", "loaded"])
def test_a_parameter_that_is_a_wrapper_is_trained(cls, trained, when):
    layer = cls(3, 4)
    layer.weight = nn.Parameter(Product(torch.randn(4, 2), torch.randn(2, 3)), requires_grad=trained)
    x = torch.randn(2, 3)
    with torch.set_grad_enabled(when != "without"), quiet():
        program = torch.export.export(layer, (x,))
    program = (reload(program) if when == "loaded" else program).module()
    torch.testing.assert_close(program(x), layer(x))
    got, want = gradients(program, x), gradients(layer, x)
    torch.testing.assert_close(got.pop("bias"), want.pop("bias"))
    assert len(got) == trained
    for name, gradient in got.items():
        assert type(gradient) is Product.Cotangent
        for one, other in zip(gradient.unwrap(), want[name].unwrap(), strict=True):
            torch.testing.assert_close(one, other)


# ---- values that a function makes --------------------------------------------------------------------------


def step(self, time):
    return Moving(self.place + time * self.speed, self.speed)


Moving = declare(
    keywords={"fallback": "map"},
    place=inner(differentiable=True),
    speed=inner(differentiable=True),
    step=step,
)
READS = {
    "of plain tensors": lambda w, x: Moving(x, x).place * 2.0,
    "of an op's result": lambda w, x: (Moving(w.place + x, w.speed) * 3.0).speed + w.place,
    "by a method": lambda w, x: w.step(0.5).step(x).place,
    "with the argument": lambda w, x: (Moving(x, x) + w).place,
    "twice": lambda w, x: Moving(*w.unwrap()).place * Moving(x, w.speed).unwrap("place"),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["frozen", "trained", "argument"])
@pytest.mark.parametrize("name", READS)
def test_fields_are_read_of_values_that_the_function_makes(name, kind, strict):
    value, x = Moving(torch.rand(2, 3), torch.rand(2, 3)), torch.rand(2, 3)
    weight = nn.Parameter(value, requires_grad=kind == "trained")
    module = Applied(READS[name], None if kind == "argument" else weight)
    args = (value, x) if kind == "argument" else (x,)
    with quiet():
        program = torch.export.export(module, args, strict=strict)
    torch.testing.assert_close(program.module()(*args), module(*args))
