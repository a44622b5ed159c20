"""A mapped in-place op that an inner tensor refuses writes to none of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from subclasses import TensorSubclass, inner
from subclasses.ops.write_checks import differ


class Counted(TensorSubclass, fallback="map"):
    number: Tensor = inner()
    count: Tensor = inner()


def make(shape=(2,), dtype=torch.int64):
    return Counted(torch.full((2,), 4.0), torch.full(shape, 4, dtype=dtype))


REFUSED = {
    "a factor": lambda x: x.mul_(2.5),
    "a plain factor": lambda x: x.mul_(torch.full((2,), 2.5)),
    "a plain summand": lambda x: x.add_(torch.full((2,), 2.5)),
    "a division": lambda x: x.div_(2),
    "bounds": lambda x: x.clamp_(0.1, 0.5),
    "bounds that are tensors": lambda x: x.clamp_(torch.tensor(0.1), torch.tensor(0.5)),
    "a value of the class": lambda x: x.mul_(make(dtype=torch.float32)),
    "out": lambda x: torch.mul(x, 2.5, out=x),
    "a kernel": lambda x: x.lerp_(make(), 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_written_where_one_dtype_is_refused(name):
    x = make()
    before = x.number._version
    with pytest.raises(RuntimeError, match=r"can't be cast|not implemented for 'Long'"):
        REFUSED[name](x)
    assert x.number.tolist() == [4.0, 4.0]
    assert x.number._version == before


@pytest.mark.parametrize(
    "write", [lambda x, t: x.mul_(t), lambda x, t: x.copy_(t), lambda x, t: x.clamp_(t, t)]
)
def test_nothing_is_written_where_one_size_is_refused(write):
    x = make((1,), torch.float32)
    with pytest.raises(RuntimeError, match="size"):
        write(x, torch.zeros(2))
    assert x.number.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.copy_(make((2,), torch.float32)),
        lambda x: x.index_add_(0, INDEX, torch.ones(2)),
        lambda x: torch._foreach_add_([x], 1.0),
    ],
)
def test_nothing_is_written_where_elements_of_one_share_memory(write):
    x = Counted(torch.full((2,), 4.0), torch.full((1,), 4.0).expand(2))
    with pytest.raises(RuntimeError, match="more than one element"):
        write(x)
    assert x.number.tolist() == [4.0, 4.0]


INDEX = torch.tensor([0, 1])


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_add_(0, INDEX, torch.ones(2)),
        lambda x: x.index_add_(0, INDEX, torch.ones(2, dtype=torch.int64), alpha=0.5),
        lambda x: x.scatter_(0, INDEX, torch.ones(2)),
        lambda x: x.index_copy_(0, INDEX, torch.ones(2)),
        lambda x: x.index_put_((INDEX,), torch.ones(2)),
        lambda x: torch.cumsum(x, 0, dtype=torch.float32, out=x),
    ],
    ids=["index_add", "alpha", "scatter", "index_copy", "index_put", "cumsum"],
)
def test_nothing_is_written_by_ops_that_are_not_pointwise(write):
    x = make()
    before = x.number._version
    with pytest.raises((RuntimeError, IndexError)):
        write(x)
    assert (x.number.tolist(), x.count.tolist()) == ([4.0, 4.0], [4, 4])
    assert x.number._version == before


def test_an_index_outside_of_the_second_inner_tensor_writes_nothing():
    x = make((1,), torch.float32)
    with pytest.raises((RuntimeError, IndexError), match="index"):
        x.index_fill_(0, torch.tensor([1]), 9.0)
    assert x.number.tolist() == [4.0, 4.0]


def test_what_all_take_is_written_by_ops_that_are_not_pointwise():
    x = make()
    x.index_fill_(0, torch.tensor([1]), 9)
    x.cumsum_(0)
    assert (x.number.tolist(), x.count.tolist()) == ([4.0, 13.0], [4, 13])
    x.zero_()
    assert (x.number.tolist(), x.count.tolist()) == ([0.0, 0.0], [0, 0])


def test_what_all_take_is_written():
    x = make()
    x.mul_(2).add_(torch.ones(2, dtype=torch.int64)).clamp_(1, 8)
    x.div_(2, rounding_mode="floor")
    assert (x.number.tolist(), x.count.tolist()) == ([4.0, 4.0], [4, 4])
    x.copy_(torch.tensor([1.0, 2.0]))
    assert (x.number.tolist(), x.count.tolist()) == ([1.0, 2.0], [1, 2])
    y = make((1,))
    y.mul_(torch.tensor([3]))
    assert (y.number.tolist(), y.count.tolist()) == ([12.0, 12.0], [12])


@pytest.mark.parametrize("name", ["normal_", "uniform_", "exponential_", "log_normal_", "cauchy_"])
def test_random_numbers_that_one_dtype_refuses(name):
    """Neither the value nor the state of the generator has changed."""
    x, state = make(), torch.get_rng_state()
    with pytest.raises(RuntimeError):
        getattr(x, name)()
    assert (x.number.tolist(), x.count.tolist()) == ([4.0, 4.0], [4, 4])
    assert torch.get_rng_state().equal(state)


def test_random_numbers_that_all_take():
    x, generator = make(), torch.Generator().manual_seed(3)
    x.random_(0, 9, generator=generator)
    generator.manual_seed(3)
    assert x.number.equal(torch.zeros(2).random_(0, 9, generator=generator))
    assert x.count.equal(torch.zeros(2, dtype=torch.int64).random_(0, 9, generator=generator))


def test_an_op_of_others_runs_once_for_each_inner_tensor():
    with torch.library._scoped_library("write_checks", "FRAGMENT") as library:
        library.define("count_(Tensor(a!) x) -> Tensor(a!)")
        seen = []
        library.impl("count_", lambda t: seen.append(t.dtype) or t.add_(1), "CompositeExplicitAutograd")
        torch.ops.write_checks.count_(make())
    assert seen == [torch.float32, torch.int64]


def test_a_compiled_write_is_the_same():
    def double(x):
        return x.mul_(2)

    x = make()
    desugar.compile(double, backend="eager")(x)
    assert (x.number.tolist(), x.count.tolist()) == ([8.0, 8.0], [8, 8])


def test_equal_inner_tensors_are_not_tried():
    assert not differ(torch.ones(2), torch.zeros(2))
    assert differ(torch.ones(2), torch.zeros(3))
    assert differ(torch.ones(2), torch.zeros(2, dtype=torch.int64))
    assert not differ(torch.ones(2), None)


# ---- lists -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda xs: torch._foreach_add_(xs, 0.5),
        lambda xs: torch._foreach_div_(xs, 3),
        lambda xs: torch._foreach_mul_(xs, [2, 2.5]),
        lambda xs: torch._foreach_add_(xs, xs[::-1], alpha=0.5),
        lambda xs: torch._foreach_add_(xs, [torch.ones(2), torch.ones(5)]),
        lambda xs: torch._foreach_addcmul_(xs, [torch.ones(2)] * 2, [torch.ones(2)] * 2),
    ],
    ids=["add", "div", "one number", "alpha", "sizes", "addcmul"],
)
def test_of_lists_no_wrapper_is_half_written(write):
    xs = [make(), make()]
    before = [(x.number.clone(), x.count.clone()) for x in xs]
    with pytest.raises(RuntimeError):
        write(xs)
    assert all(x.number.equal(n) and x.count.equal(c) for x, (n, c) in zip(xs, before, strict=True))


def test_lists_of_other_sizes_are_written():
    xs = [make(), make((1,)), torch.ones(3)]
    torch._foreach_mul_(xs, [2, 3, 4.0])
    assert (xs[0].number.tolist(), xs[0].count.tolist()) == ([8.0, 8.0], [8, 8])
    assert (xs[1].number.tolist(), xs[1].count.tolist(), xs[2].tolist()) == ([12.0, 12.0], [12], [4.0] * 3)
