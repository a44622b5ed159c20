"""Each item of a signature: a call that differs in it compiles anew, one that does not runs what is there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.desugar.classes import EVERY, Beside, Labeled, Nested, Pair, Tagged, TwoTensor, make
from tests.desugar.judge import by_pass, judge


def product(x, y):
    return x * y + x.sin()


def assert_programs(fn, calls: Sequence, count: int, around: Sequence = (), **options):
    """Every call is right, twice over, and `count` programs are compiled."""
    compiled = by_pass(fn, **options)
    for _ in range(2):
        for n, make_args in enumerate(calls):
            judge(fn, make_args, compiled, around=around[n] if around else contextlib.nullcontext)
    assert len(compiled.programs) == count, [p.source for p in compiled.programs][:2]
    return compiled


def pair(cls=TwoTensor, *size, grad=(False, False)):
    size = size or (2, 6)
    return lambda: (make(cls, *size, grad=grad[0]), torch.randn(size[-1], requires_grad=grad[1]))


# ---- the state around ----------------------------------------------------------------------------------------


def test_grad_mode():
    call = pair(grad=(True, True))
    assert_programs(product, [call, call], 2, [contextlib.nullcontext, torch.no_grad])


def test_inference_mode():
    around = [torch.no_grad, torch.inference_mode, contextlib.nullcontext]
    assert_programs(product, [pair()] * 3, 3, around)


def test_inference_tensors():
    def inference_args():
        with torch.inference_mode():
            return pair()()

    assert_programs(product, [pair(), inference_args], 1 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    around = [contextlib.nullcontext, lambda: torch.autocast("cpu", dtype=dtype)]
    assert_programs(lambda x, y: x @ y, [lambda: (make(Pair, 3, 3), torch.randn(3, 3))] * 2, 2, around)


def test_autocast_dtype():
    around = [
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ]
    assert_programs(lambda x, y: x @ y, [lambda: (make(Pair, 3, 3), torch.randn(3, 3))] * 2, 2, around)


def test_default_dtype():
    @contextlib.contextmanager
    def double():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    calls = [lambda: (make(Pair, 3),)] * 2
    assert_programs(lambda x: x + torch.ones(3), calls, 2, [contextlib.nullcontext, double])


def test_default_device():
    calls = [lambda: (make(Pair, 3),)] * 2
    around = [contextlib.nullcontext, lambda: torch.device("meta")]
    assert_programs(lambda x: (x * 2, torch.ones(3)), calls, 2, around)


def test_deterministic_algorithms():
    @contextlib.contextmanager
    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def fn(x):
        return x * (2 if torch.are_deterministic_algorithms_enabled() else 1)

    assert_programs(fn, [lambda: (make(Pair, 3),)] * 2, 2, [contextlib.nullcontext, deterministic])


# ---- tensors -------------------------------------------------------------------------------------------------


def test_requires_grad_of_each_argument():
    calls = [pair(grad=(a, b)) for a in (False, True) for b in (False, True)]
    assert_programs(product, calls, 4)


def test_classes():
    assert_programs(product, [pair(cls) for cls in EVERY], len(EVERY))


def test_dtype_and_dims_and_strides():
    calls = [
        pair(),
        lambda: (make(TwoTensor, 2, 6, dtype=torch.float64), torch.randn(6)),
        lambda: (make(TwoTensor, 2, 6), torch.randn(2, 6)),
        lambda: (TwoTensor(torch.randn(6, 2).t(), torch.randn(6, 2).t()), torch.randn(6)),
        lambda: (TwoTensor(torch.randn(2, 6), torch.randn(2, 6)), torch.randn(12)[::2]),
    ]
    assert_programs(product, calls, len(calls))


def test_plain_or_wrapper_or_parameter():
    t = torch.randn
    calls = [
        lambda: (t(3), t(3)),
        lambda: (make(Pair, 3), t(3)),
        lambda: (t(3), make(Pair, 3)),
        lambda: (nn.Parameter(t(3)), t(3)),
    ]
    assert_programs(product, calls, 4)


def test_metadata_by_hand_and_declared():
    t = torch.randn
    for cls, word in ((Tagged, "tag"), (Labeled, "label")):
        calls = [lambda v=v, c=cls, w=word: (c(t(2, 3), t(2, 3), **{w: v}), t(3)) for v in ("u", "v")]
        assert_programs(product, calls, 2)


def test_absent_inner_tensors():
    t = torch.randn
    assert_programs(product, [lambda: (Labeled(t(3)), t(3)), lambda: (Labeled(t(3), t(3)), t(3))], 2)


def test_which_arguments_are_one_object():
    x = [make(TwoTensor, 2, 3), make(TwoTensor, 2, 3)]
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    calls = [
        lambda: (x[0], x[1]),
        lambda: (x[0], x[0]),
        lambda: (TwoTensor(a, b), TwoTensor(b, a)),
        lambda: (TwoTensor(a, b), TwoTensor(a, b)),
        lambda: (TwoTensor(a, a), TwoTensor(b, b)),
    ]
    assert_programs(product, calls, 5)


def test_a_wrapper_inside_of_two_others():
    pair, flat = make(Pair, 3), torch.randn(3)

    def fn(x, y):
        return x * y

    calls = [
        lambda: (make(Nested, 3), make(Nested, 3)),
        lambda: (Nested(pair, flat), Nested(pair, torch.randn(3))),
        lambda: (Nested(make(Pair, 3), flat), Nested(make(Pair, 3), flat)),
        lambda: (make(Nested, 3), pair),
    ]
    assert_programs(lambda x, y: x * 2, calls, 3 + 1)
    x = Nested(pair, flat)
    assert_programs(fn, [lambda: (x, Nested(pair, flat))], 1)


def test_structure():
    t = torch.randn
    calls = [
        lambda: ({"a": t(3)},),
        lambda: ({"a": t(3), "b": t(3)},),
        lambda: ({"b": t(3), "a": t(3)},),
        lambda: ([t(3)],),
        lambda: ((t(3),),),
        lambda: (t(3),),
    ]

    def fn(d):
        return sum(d.values()) * 2 if isinstance(d, dict) else d[0] * 2

    assert_programs(fn, calls, 6)  # the order of a dict's keys counts


# ---- constants -----------------------------------------------------------------------------------------------

CONSTANTS = [1, True, 1.0, 2, 2.0, 1j, math.inf]


def test_constants_by_type_and_value():
    assert_programs(lambda x, n: x * n, [lambda n=n: (make(Pair, 3), n) for n in CONSTANTS], len(CONSTANTS))


@pytest.mark.parametrize("values", [[0.0, -0.0], [math.nan, float("nan")]], ids=str)
def test_odd_floats(values):
    calls = [lambda n=n: (torch.ones(3), n) for n in values]
    assert_programs(lambda x, n: torch.copysign(x, torch.tensor(n)), calls, 1 + (values[0] == 0))


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lambda x, n: x * 2 if n == "a" else x + 1, ["a", "b"]),
        (lambda x, n: x.to(n), [torch.float64, torch.bfloat16]),
        (lambda x, n: (x * 2)[n] + 0, [slice(0, 2), slice(1, 2), 0]),
        (lambda x, n: x * 2 if n is None else x * n, [None, 3]),
        (lambda x, n: x * n[0], [[1], [2], (1,), [1, 2]]),
        (lambda x, n: n(x), [torch.sin, torch.cos]),
        (lambda x, n: x + torch.zeros(2, device=n)[0], [torch.device("cpu"), "cpu"]),
        (lambda x, n: x.reshape(n) * 2, [torch.Size([2, 2]), torch.Size([4, 1])]),
    ],
    ids=["str", "dtype", "slice", "None", "list", "function", "device", "Size"],
)
def test_other_constants(fn, values):
    assert_programs(fn, [lambda n=n: (make(Pair, 4), n) for n in values], len(values))


def test_equal_objects_of_an_unknown_type_are_told_apart():
    class Scale:
        def __init__(self, by):
            self.by = by

        def __eq__(self, other):
            return True

        __hash__ = None  # type: ignore[assignment]

    scales = [Scale(2), Scale(3)]
    assert_programs(lambda x, s: x * s.by, [lambda s=s: (make(Pair, 3), s) for s in scales], 2)


# ---- modules, slots, cells -----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.weight = nn.Parameter(make(TwoTensor, 3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.drop(self.linear(x) * self.weight + self.shift)


def same(compiled, module, x):
    state = torch.get_rng_state()
    got = compiled(x)
    torch.set_rng_state(state)
    want = module(x)
    torch.testing.assert_close(got.a, want.a)
    torch.testing.assert_close(got.b, want.b)


def test_training_of_each_submodule():
    module, x = Net(), torch.randn(2, 3)
    compiled = by_pass(module)
    same(compiled, module, x)
    for change, count in (
        (lambda: compiled.eval(), 2),
        (lambda: module.train(), 2),
        (lambda: module.drop.eval(), 3),
    ):
        change()
        same(compiled, module, x)
        assert len(compiled.programs) == count


def test_parameter_and_buffer_slots():
    module, x = Net().eval(), torch.randn(2, 3)
    compiled = by_pass(module)
    same(compiled, module, x)

    def in_place():
        with torch.no_grad():
            module.linear.weight.mul_(2)
            module.shift.add_(1)

    changes = [
        (in_place, 1),
        (lambda: setattr(module.linear, "weight", nn.Parameter(torch.randn(3, 3))), 2),
        (lambda: setattr(module, "shift", torch.zeros(3)), 3),
        (
            lambda: module.load_state_dict(
                {k: v.clone() for k, v in module.state_dict().items()}, assign=True
            ),
            4,
        ),
        (lambda: setattr(module.linear, "bias", None), 5),
    ]
    for change, count in changes:
        change()
        same(compiled, module, x)
        assert len(compiled.programs) == count


def test_closure_cells():
    w, k, x = torch.ones(3, requires_grad=True), 2, make(TwoTensor, 2, 3)

    def fn(x):
        return x * w * k

    compiled = by_pass(fn)
    same(compiled, fn, x)
    with torch.no_grad():
        w.add_(1)
    same(compiled, fn, x)
    assert len(compiled.programs) == 1
    k = 3
    same(compiled, fn, x)
    w = torch.zeros(3)
    same(compiled, fn, x)
    assert len(compiled.programs) == 3
    w = make(TwoTensor, 3)
    same(compiled, fn, x)


def test_requires_grad_of_a_captured_tensor():
    w = torch.ones(3, requires_grad=True)
    compiled = judge(lambda x: x * w, lambda: (make(Pair, 3),))
    w.requires_grad_(False)
    judge(lambda x: x * w, lambda: (make(Pair, 3),), compiled)


@pytest.mark.parametrize("before", [False, True])
def test_captured_tensor_is_argument(before):
    w = torch.ones(3, requires_grad=True)
    compiled = by_pass(lambda x: x * w)
    if before:
        compiled(torch.ones(3, requires_grad=True))
    (grad,) = torch.autograd.grad(compiled(w), w, torch.ones(3))
    assert grad.tolist() == [2, 2, 2]


def test_an_inner_tensor_of_a_captured_wrapper_is_the_argument():
    a = torch.ones(3)
    w = TwoTensor(a, a + 1)
    compiled = by_pass(lambda x: x * w)
    for x in (torch.ones(3), a, torch.ones(3)):
        assert torch.equal(compiled(x).b, x * w.b)


# ---- the text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Pair, Labeled, Beside])
def test_metadata_of_a_declared_class_is_one_identity_test(cls):
    compiled = by_pass(lambda x: x.sin())
    compiled(make(cls, 2, 6))
    text = compiled.programs[0].source
    assert "a0._layout is not layout" in text and "__tensor_flatten__" not in text


def test_all_tensors_are_checked_in_one_call():
    compiled = by_pass(lambda *xs: sum(xs))
    compiled(*(torch.ones(3) for _ in range(9)))
    assert compiled.programs[0].source.count("same_tensors") == 1


def test_dropout_module_in_a_list():
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Dropout(0.0)])
    judge(lambda x: layers[1](layers[0](x)), lambda: (torch.randn(2, 3, requires_grad=True),), calls=2)
    assert F.relu(torch.zeros(1)) == 0
