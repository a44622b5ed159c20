"""Assigning to a part of a tensor subclass behind Dynamo: graphs break there, for this pass alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.desugar.classes import Pair, Single, TwoTensor, make, plain_parts
from tests.desugar.judge import by_dynamo, by_pass, judge
from tests.doors import by_torch

WAYS = {"pass": by_pass, "dynamo": by_torch}


def of_an_argument(x):
    x.a = x.a * 3
    return x + 1


def after_a_use(x):
    y = x * 2
    x.a = x.a + 1
    return y, x * y


def of_an_intermediate(x):
    y = x * 2
    y.a = y.a + 1
    return y + 1


def in_a_function_of_its_own(x):
    of_an_argument(x)
    return x * 2


def by_name(x):
    setattr(x, "a", x.a * 5)  # noqa: B010 - the builtin is what is tried
    return x.a, x + 1


def without_gradients(x):
    with torch.no_grad():
        x.b = x.b.detach() * 2
    return x.sin()


FUNCTIONS = [
    of_an_argument,
    after_a_use,
    of_an_intermediate,
    in_a_function_of_its_own,
    by_name,
    without_gradients,
]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [TwoTensor, Pair])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_ops_after_it_see_the_new_tensor(fn, cls, way):
    judge(fn, lambda: (make(cls, 2, 6),), WAYS[way](fn))


def of_a_nested_value(x):
    x.b.a = x.b.a * 3
    return x + 1


@pytest.mark.parametrize("way", WAYS)
def test_of_a_nested_value(way):
    make_args = lambda: (Pair(torch.ones(2), Pair(torch.ones(2), torch.ones(2))),)  # noqa: E731
    judge(of_a_nested_value, make_args, way=WAYS[way], calls=2)


def test_of_a_parameter_of_a_module():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(make(Pair, 6), requires_grad=False)

        def forward(self, x):
            self.weight.a = self.weight.a + 1
            return x * self.weight

    module = Scaling()
    compiled = by_torch(module)
    for count in (1, 2, 3):
        before = module.weight.a.clone()
        out = compiled(torch.ones(6))
        torch.testing.assert_close(module.weight.a, before + 1, msg=f"call {count}")
        torch.testing.assert_close(plain_parts(out), plain_parts(module.weight))


def test_a_whole_graph_is_refused_with_the_reason():
    x = make(Pair, 3)
    kept = x.a
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"the next one sees the new[\s\S]*Pair\.a = "):
        by_dynamo(of_an_argument)(x)
    assert x.a is kept


def test_other_attributes_keep_one_graph():
    def marks(x):
        x.mark = 1
        return x + 1

    assert by_dynamo(marks)(x := make(Pair, 3)).a.shape == (3,)
    assert x.mark == 1


@pytest.mark.parametrize(("cls", "graphs"), [(Pair, 2), (TwoTensor, 1)])
def test_other_backends_end_the_graphs_of_declared_classes(cls, graphs):
    counter = CompileCounterWithBackend("eager")
    torch.compile(of_an_argument, backend=counter)(make(cls, 3))
    assert counter.frame_count == graphs


# ---- a class whose own dispatch assigns ----------------------------------------------------------------------


class Replacing(Single):
    """A class that writes by another inner tensor, as some quantized weights do."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.mul_.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        args[0].a = args[0].a * args[1]
        return args[0]


def doubles(x):
    x.mul_(2)
    return x + 1


def doubles_twice(x, y):
    x.mul_(2)
    y.mul_(5)
    x.mul_(3)
    return x + y


def reads(x):
    x.mul_(2)
    return x.a + 1


def adds(x, y):
    x.mul_(2)
    return x + y


def replacing(count):
    return tuple(Replacing(torch.arange(3.0) + n) for n in range(count))


def assert_same(got, want):
    torch.testing.assert_close([x.a for x in got], [x.a for x in want])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fn", "count"), [(doubles, 1), (doubles_twice, 2)])
def test_a_dispatch_that_replaces_inner_tensors(fn, count, way):
    compiled, mine, theirs = WAYS[way](fn), replacing(count), replacing(count)
    for _ in range(3):
        assert_same([compiled(*mine), *mine], [fn(*theirs), *theirs])


REFUSED = {
    "read": (
        lambda x, compiled: compiled(x),
        reads,
        r"which Dynamo does before the graph runs[\s\S]*instead: write to \.a with copy_",
    ),
    "an argument too": (
        lambda x, compiled: compiled(x, x.a),
        adds,
        r"gets it as an argument, too[\s\S]*pass a clone\(\) of \.a",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_replaced_inner_tensor_that_is_used_is_refused(name, way):
    call, fn, said = REFUSED[name]
    (x,) = replacing(1)
    with pytest.raises(Exception, match=said):
        call(x, WAYS[way](fn))
    assert_same([x], replacing(1))


@pytest.mark.parametrize("way", WAYS)
def test_a_clone_of_a_replaced_inner_tensor_is_an_argument(way):
    ((x,), (same,)) = replacing(1), replacing(1)
    assert_same([WAYS[way](adds)(x, x.a.clone()), x], [adds(same, same.a.clone()), same])
