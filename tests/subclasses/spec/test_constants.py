"""Constants of a class: one tensor for each device in eager mode, part of the graph in every trace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from subclasses import Outer, SpecError, constant, inner
from subclasses._torch import fake_mode
from subclasses.methods.compile_cache import fingerprint
from tests.doors import DOORS
from tests.subclasses.subjects import declare
from tests.tables import giving, raising

aten = torch.ops.aten


def of_function(func, x):
    return func(x.levels[x.codes.long()]) * x.unwrap("scale")


Coded = declare(
    name="Coded",
    __module__=__name__,
    keywords={"fallback": "materialize"},
    codes=inner(dtype=torch.uint8),
    scale=inner(),
    levels=constant([-1.0, 0.0, 0.5, 2.0]),
    outer=staticmethod(lambda codes, scale: Outer(codes.shape, dtype=scale.dtype)),
    materialize=lambda self: self.levels[self.codes.long()] * self.scale,
    rules={
        torch.cos: of_function,
        aten.sin.default: lambda func, x: func(x.levels[x.codes.long()]) * x.scale,
    },
)


def plain(x):
    return torch.tensor([-1.0, 0.0, 0.5, 2.0])[x.codes.long()]


def coded(grad=False):
    codes = torch.randint(0, 4, (4, 3), dtype=torch.uint8)
    return Coded(codes, torch.rand(4, 1).requires_grad_(grad))


COMPILERS: dict[str, Any] = {
    "stock eager": lambda fn: torch.compile(fn, backend="eager", fullgraph=True),
    "inductor": lambda fn: torch.compile(fn, fullgraph=True),
    **DOORS,
}
FUNCTIONS: dict[str, Any] = {
    "materialize": (
        lambda x: F.linear(torch.ones(2, 3), x),
        lambda x: F.linear(torch.ones(2, 3), plain(x) * x.scale),
    ),
    "rule above autograd": (lambda x: torch.cos(x), lambda x: plain(x).cos() * x.scale),
    "rule below autograd": (lambda x: x.sin(), lambda x: plain(x).sin() * x.scale),
    "read": (lambda x: x.levels * 2, lambda x: torch.tensor([-2.0, 0.0, 1.0, 4.0])),
    "read of an intermediate": (
        lambda x: x.clone().levels + 0,
        lambda x: torch.tensor([-1.0, 0.0, 0.5, 2.0]),
    ),
    "read of the class": (
        lambda x: Coded.levels.on(x.device) + 0,
        lambda x: torch.tensor([-1.0, 0.0, 0.5, 2.0]),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "compiler", [pytest.param(c, marks=[pytest.mark.slow] * (c == "inductor")) for c in COMPILERS]
)
def test_every_compile_path(compiler, name):
    fn, expected = FUNCTIONS[name]
    compiled = COMPILERS[compiler](fn)
    for x in (coded(), coded()):
        torch.testing.assert_close(compiled(x), expected(x))


@pytest.mark.parametrize("name", ["materialize", "rule above autograd"])
@pytest.mark.parametrize("compiler", ["eager", "stock", "desugar"])
def test_gradients(compiler, name):
    fn, expected = FUNCTIONS[name]
    scale = torch.rand(4, 1, requires_grad=True)
    codes = torch.randint(0, 4, (4, 3), dtype=torch.uint8)
    got = torch.autograd.grad(COMPILERS[compiler](lambda s: fn(Coded(codes, s)))(scale).square().sum(), scale)
    leaf = scale.detach().requires_grad_()
    plainly = type("Plain", (), {"codes": codes, "scale": leaf})
    torch.testing.assert_close(got[0], torch.autograd.grad(expected(plainly).square().sum(), leaf)[0])


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module, x = nn.Linear(3, 4, bias=False), torch.ones(2, 3)
    module.weight = nn.Parameter(coded(), requires_grad=False)
    torch.testing.assert_close(torch.export.export(module, (x,), strict=strict).module()(x), module(x))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    x = coded()
    graph = make_fx(lambda codes, scale: Coded(codes, scale).materialize(), tracing_mode=mode)(
        x.codes, x.scale
    )
    other = coded()
    assert torch.equal(graph(other.codes, other.scale), other.materialize())


def test_values_without_data():
    assert coded().to("meta").materialize().is_meta
    with fake_mode():
        x = Coded(torch.empty(4, 3, dtype=torch.uint8), torch.empty(4, 1))
        assert type(x.materialize()) is type(x.scale)
    assert type(x.levels) is type(x.scale)  # outside of the mode too
    assert type(coded().levels) is Tensor


def test_vmap_and_inference_mode_do_not_leak_into_later_calls():
    Fresh = declare(Coded, levels=constant([1.0, 2.0]))
    with torch.inference_mode():
        assert not Fresh.levels.on("cpu").is_inference()
    x = Fresh(torch.zeros(2, dtype=torch.uint8), torch.ones(2, requires_grad=True))
    (x.materialize() * x.levels).sum().backward()
    assert torch.equal(
        torch.vmap(lambda t: t * Fresh.levels.on("cpu"))(torch.ones(3, 2)), torch.tensor([[1.0, 2.0]] * 3)
    )


# ---- the object --------------------------------------------------------------------------------------------


test_one_tensor_for_each_device = giving(
    {
        "one": (lambda: coded().levels is coded().levels is Coded.levels.on("cpu"), True),
        "another device": (lambda: Coded.levels.on("meta").is_meta, True),
        "no field": (lambda: Coded.__spec__.names, ("codes", "scale")),
    }
)


def facts(t):
    return t.dtype, t.requires_grad, t.tolist()


def made_of(level):
    return fingerprint(declare(levels=constant([level])))


test_what_it_is_made_from = giving(
    {
        **{
            f"{values} of {dtype}": (
                lambda values=values, dtype=dtype: facts(constant(values, dtype=dtype).on("cpu")),
                facts(expected),
            )
            for values, dtype, expected in [
                ([1, 2], None, torch.tensor([1, 2])),
                ([[1.5], [2.5]], None, torch.tensor([[1.5], [2.5]])),
                ([1, 2], torch.bfloat16, torch.tensor([1.0, 2.0], dtype=torch.bfloat16)),
                (torch.tensor([0.1, 0.2]), None, torch.tensor([0.1, 0.2])),
                (torch.tensor([True]), None, torch.tensor([True])),
                (3.0, None, torch.tensor(3.0)),
                (torch.tensor([1 + 2j]), None, torch.tensor([1 + 2j])),
            ]
        },
        # The key of the cache of compiled programs has its values.
        "equal numbers": (lambda: made_of(1.0) == made_of(1.0), True),
        "other numbers": (lambda: made_of(1.0) == made_of(2.0), False),
    }
)


TAKES = r"constant\(\) takes numbers, nested lists of them or a tensor with data"
NO_TENSOR = (
    r"Coded\.levels, read from the class, is not a tensor and has no 'shape': Coded\.levels\.on\(device\) is"
)
REFUSED = {
    "a tensor whose gradient would be lost": (
        lambda: constant(torch.tensor([0.1], requires_grad=True)),
        SpecError,
        r"does not require grad.*t\.detach\(\), or declare.*inner\(\)",
    ),
    "text": (lambda: constant(["a"]), SpecError, TAKES),
    "None": (lambda: constant(None), SpecError, TAKES),
    "a tensor without data": (lambda: constant(torch.ones(2, device="meta")), SpecError, TAKES),
    "rows of two lengths": (lambda: constant([[1], [1, 2]]), SpecError, TAKES),
    "an assignment": (
        lambda: setattr(coded(), "levels", torch.ones(4)),
        AttributeError,
        r"Coded\.levels is a constant of the class; declare an inner\(\)",
    ),
    "an attribute of a tensor, read from the class": (
        lambda: Coded.levels.shape,
        AttributeError,
        NO_TENSOR,
    ),
    "another attribute, read from the class": (
        lambda: Coded.levels.anything,
        AttributeError,
        "'Constant' object has no attribute 'anything'",
    ),
}


test_what_is_refused = raising(REFUSED)


def test_a_write_is_told_at_the_next_reading():
    own = declare(Coded, name="Own", levels=constant([1.0, 2.0]))
    x = own(torch.tensor([1], dtype=torch.uint8), torch.ones(1))
    x.levels.add_(1)
    with pytest.raises(
        RuntimeError, match=r"Own\.levels was written to, and is shared .* x\.levels\.clone\(\)"
    ):
        x.materialize()
    assert x.materialize().tolist() == [2.0]


def test_a_child_has_it_and_may_have_its_own():
    same, other = declare(Coded), declare(Coded, levels=constant([9.0] * 4))
    x = coded()
    assert torch.equal(same(x.codes, x.scale).materialize(), x.materialize())
    assert torch.equal(other(x.codes, x.scale).materialize(), (9 * x.scale).expand(4, 3))
    assert fingerprint(other) != fingerprint(same)


def test_copies_and_pickles():
    x = coded()
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(y.materialize(), x.materialize())
