"""The `__tensor_unflatten__` of an adopted class: what it builds is what the class's own method builds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import subclasses


def run_on_both(cls, func, args):
    if func is torch.ops.prim.device.default:
        return args[0].a.device
    return cls(*(func(*(getattr(x, n) if isinstance(x, cls) else x for x in args)) for n in "ab"))


def make_class(*, extra=False, slots=False, policy=False):
    """A handwritten pair that counts how often its own method runs."""

    class Pair(Tensor):
        if slots:
            __slots__ = ("more",)
        calls = 0

        policies = staticmethod(lambda: {"dispatch_device": True} if policy else {})

        @staticmethod
        def __new__(cls, a, b, tag=None):
            return Tensor._make_wrapper_subclass(
                cls,
                a.size(),
                strides=a.stride(),
                storage_offset=a.storage_offset(),
                dtype=b.dtype if tag == "second" else a.dtype,
                device=a.device,
                requires_grad=a.requires_grad,
                **cls.policies(),
            )

        def __init__(self, a, b, tag=None):
            self.a, self.b = a, b
            if extra:
                self.sum = a.shape[0]

        def __tensor_flatten__(self):
            return ["a", "b"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
            cls.calls += 1
            return cls(inner["a"], inner["b"], "second" if context == "second" else None)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return run_on_both(cls, func, args)

    return subclasses.adopt(Pair)


def build(cls, a, b, context=None):
    return cls.__tensor_unflatten__({"a": a, "b": b}, context, a.size(), a.stride())


def check(x, a, b, dtype=None):
    assert x.a is a and x.b is b and x.shape == a.shape and x.stride() == a.stride()
    assert x.dtype == (dtype or a.dtype) and x.storage_offset() == a.storage_offset()
    assert x.requires_grad == a.requires_grad and x.is_inference() == torch.is_inference_mode_enabled()


def test_a_proved_method_runs_once_for_each_kind():
    cls = make_class()
    for size in ((2, 3), (4, 1), (0, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.ones(size, dtype=dtype), torch.zeros(size, dtype=dtype)
            for pair in ((a, b), (a.t(), b.t())):
                check(build(cls, *pair), *pair)
    assert cls.calls == 2
    half, full = torch.ones(2, dtype=torch.float16), torch.ones(2)
    for _ in range(2):
        check(build(cls, half, full, "second"), half, full, torch.float32)
        check(build(cls, half, full), half, full)
    assert cls.calls == 4


@pytest.mark.parametrize(
    "a", [torch.ones(6)[2:], torch.ones(4, requires_grad=True), torch.nn.Parameter(torch.ones(4))]
)
def test_what_a_bare_wrapper_would_not_be_is_left_to_the_class(a):
    cls = make_class()
    plain = torch.ones(4)
    check(build(cls, plain, plain), plain, plain)
    for _ in range(2):
        check(build(cls, a, a), a, a)
    assert cls.calls == 3


@pytest.mark.parametrize("kind", [{"extra": True}, {"slots": True}, {"policy": True}])
def test_a_class_that_holds_more_is_asked_each_time(kind):
    cls, a = make_class(**kind), torch.ones(4)
    for _ in range(3):
        x = build(cls, a, a)
        assert x.a is a and x.b is a and x.shape == (4,)
        assert "extra" not in kind or x.sum == 4
    assert cls.calls == 3


def test_in_inference_mode_and_compiled():
    cls, a, b = make_class(), torch.ones(2, 3), torch.zeros(2, 3)
    with torch.inference_mode():
        for _ in range(2):
            check(build(cls, a, b), a, b)
    compiled = torch.compile(lambda x: (x * 2, x + 1), backend="aot_eager")
    for _ in range(3):
        doubled, more = compiled(cls(a, b))
        assert (type(doubled), type(more)) == (cls, cls)
        assert doubled.a.sum() == 12 and doubled.b.sum() == 0 and more.b.sum() == 6


def test_metadata_without_a_hash():
    cls, a = make_class(), torch.ones(4)
    for _ in range(2):
        check(build(cls, a, a, ["second"]), a, a)
    assert cls.calls == 2
