"""The kind of a class: its default, refused kinds, and the gradients that follow from it."""

import pytest
import torch
from torch import nn

from subclasses import SpecError, inner
from subclasses.ragged import JaggedTensor
from tests.doors import COMPILED, DOORS
from tests.subclasses.subjects import declare as declare_any
from tests.tables import giving, raising

aten = torch.ops.aten


def declare(*, materialize=False, **keywords):
    """A class with a field, and with `materialize` where it is given."""
    members = {"materialize": lambda self: self.held.exp()} if materialize else {}
    return declare_any(keywords=keywords, **members)


@pytest.mark.parametrize(
    ("keywords", "kind", "leaf"),
    [
        ({}, "structure", True),
        ({"fallback": "views"}, "structure", True),
        ({"fallback": "map"}, "structure", True),
        ({"fallback": "map", "materialize": True}, "structure", True),
        ({"fallback": "materialize", "materialize": True}, "representation", False),
        ({"fallback": "materialize", "materialize": True, "trainable": True}, "representation", True),
        ({"materialize": True}, "representation", False),
        ({"materialize": True, "kind": "structure"}, "structure", True),
        ({"fallback": "materialize", "materialize": True, "kind": "structure"}, "structure", True),
    ],
)
def test_the_kind_and_the_gradient_of_a_leaf(keywords, kind, leaf):
    cls = declare(**keywords)
    assert (cls.__spec__.kind, cls._traits.is_representation) == (kind, kind == "representation")
    assert cls._traits.has_leaf_cotangents is leaf
    assert declare_any(cls).__spec__.kind == kind


test_what_does_not_fit_is_refused_at_the_class_statement = raising(
    [
        (lambda keywords=keywords: declare(**keywords), SpecError, message)
        for keywords, message in [
            ({"kind": "number"}, r"Made: expected kind in \('representation', 'structure'\), got 'number'"),
            (
                {"kind": "representation", "fallback": "map"},
                r'Made: kind="representation" with fallback="map".*leave kind',
            ),
            (
                {"kind": "representation"},
                r"Made: kind=\"representation\" needs a method `materialize\(self\)",
            ),
        ]
    ]
)


def product(func, x, y):
    both = isinstance(x, Log) and isinstance(y, Log)
    return Log(x.logs + y.logs) if both else NotImplemented


# Probabilities by their logarithms, which an optimizer steps.
Log = declare_any(
    keywords={"fallback": "materialize", "kind": "structure", "trainable": True},
    logs=inner(differentiable=True),
    materialize=lambda self: self.logs.exp(),
    rules={aten.mul.Tensor: product},
)


LOSSES = {
    "by logarithms": (lambda x, y: (x * y).logs.sum() * 3, lambda a, b: (a + b).sum() * 3),
    "as a whole": (lambda x, y: (x * y).materialize().sum(), lambda a, b: (a + b).exp().sum()),
    "materialized": (
        lambda x, y: ((x + 1).sin() * y.sqrt()).sum(),
        lambda a, b: ((a.exp() + 1).sin() * b.exp().sqrt()).sum(),
    ),
    "one of them": (
        lambda x, y: x.logs.square().sum() + 0 * y.logs.sum(),
        lambda a, b: a.square().sum() + 0 * b.sum(),
    ),
}


@pytest.mark.parametrize(
    ("door", "names"), [*(("eager", [name]) for name in LOSSES), *((door, [*LOSSES]) for door in COMPILED)]
)
def test_gradients_of_a_structure_with_a_conversion(door, names):
    """Gradients are by the inner tensors, even if the computation uses a plain tensor."""
    logs = [torch.tensor([0.5, -1.0, 0.25]), torch.tensor([0.1, 0.2, -0.3])]
    leaves = [Log(t.clone()).requires_grad_() for t in logs]
    separate = [t.clone().requires_grad_() for t in logs]
    DOORS[door](lambda x, y: sum(LOSSES[name][0](x, y) for name in names))(*leaves).backward()
    sum(LOSSES[name][1](*separate) for name in names).backward()
    for x, t in zip(leaves, separate, strict=True):
        assert type(x.grad) is Log.Cotangent
        torch.testing.assert_close(x.grad.logs, t.grad)


def test_a_step_moves_the_logarithms():
    p, t = nn.Parameter(Log(torch.tensor([0.5, -1.0]))), torch.tensor([0.5, -1.0], requires_grad=True)
    for x, value in ((p, lambda: (p * p).logs), (t, lambda: 2 * t)):
        optimizer = torch.optim.AdamW([x], lr=0.1)
        value().square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(p.detach().logs, t.detach())


test_a_value_in_place_of_a_cotangent_of_a_structure = raising(
    [
        (
            lambda: (Log(torch.ones(2, requires_grad=True)) * Log(torch.ones(2))).backward(
                Log(torch.ones(2))
            ),
            r"Write x\.cotangent\(logs=\.\.\.\)",
        )
    ]
)
test_what_a_class_shows_of_its_kind = giving(
    {
        "a shipped class": (
            lambda: (JaggedTensor.__spec__.kind, JaggedTensor._traits.has_cotangents),
            ("structure", False),
        ),
        "another kind than the default": (
            lambda: "kind='structure'" in repr(declare(materialize=True, kind="structure").__spec__),
            True,
        ),
        "the default": (lambda: "kind" in repr(declare(materialize=True).__spec__), False),
    }
)
