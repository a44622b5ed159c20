"""A mapped in-place op that an inner tensor refuses writes to none of them."""

import pytest
import torch

from subclasses import inner
from subclasses.op_schemas.write_checks import differ
from tests.doors import by_desugar
from tests.subclasses.subjects import declare
from tests.tables import giving

Counted = declare(keywords={"fallback": "map"}, number=inner(), count=inner())
INDEX = torch.tensor([0, 1])


def make(shape=(2,), dtype=torch.int64):
    return Counted(torch.full((2,), 4.0), torch.full(shape, 4, dtype=dtype))


def shared():
    return Counted(torch.full((2,), 4.0), torch.full((1,), 4.0).expand(2))


def held_by(x):
    return x.number.tolist(), x.count.tolist()


# By a dtype that one inner tensor refuses, a size, elements that share memory, an index.
REFUSED = {
    "a factor": (make, lambda x: x.mul_(2.5)),
    "a plain factor": (make, lambda x: x.mul_(torch.full((2,), 2.5))),
    "a plain summand": (make, lambda x: x.add_(torch.full((2,), 2.5))),
    "a division": (make, lambda x: x.div_(2)),
    "bounds": (make, lambda x: x.clamp_(0.1, 0.5)),
    "bounds that are tensors": (make, lambda x: x.clamp_(torch.tensor(0.1), torch.tensor(0.5))),
    "a value of the class": (make, lambda x: x.mul_(make(dtype=torch.float32))),
    "out": (make, lambda x: torch.mul(x, 2.5, out=x)),
    "a kernel": (make, lambda x: x.lerp_(make(), 0.5)),
    "size, mul": (lambda: make((1,), torch.float32), lambda x: x.mul_(torch.zeros(2))),
    "size, copy": (lambda: make((1,), torch.float32), lambda x: x.copy_(torch.zeros(2))),
    "size, clamp": (lambda: make((1,), torch.float32), lambda x: x.clamp_(torch.zeros(2), torch.zeros(2))),
    "shared, add": (shared, lambda x: x.add_(1)),
    "shared, copy": (shared, lambda x: x.copy_(make((2,), torch.float32))),
    "shared, index_add": (shared, lambda x: x.index_add_(0, INDEX, torch.ones(2))),
    "shared, list": (shared, lambda x: torch._foreach_add_([x], 1.0)),
    "index_add": (make, lambda x: x.index_add_(0, INDEX, torch.ones(2))),
    "alpha": (make, lambda x: x.index_add_(0, INDEX, torch.ones(2, dtype=torch.int64), alpha=0.5)),
    "scatter": (make, lambda x: x.scatter_(0, INDEX, torch.ones(2))),
    "index_copy": (make, lambda x: x.index_copy_(0, INDEX, torch.ones(2))),
    "index_put": (make, lambda x: x.index_put_((INDEX,), torch.ones(2))),
    "cumsum": (make, lambda x: torch.cumsum(x, 0, dtype=torch.float32, out=x)),
    "an index": (lambda: make((1,), torch.float32), lambda x: x.index_fill_(0, INDEX[1:], 9.0)),
}
WORDS = {"size": "size", "shared": "more than one element", "an index": "index|has other elements"}
DTYPE = {"index_add", "alpha", "scatter", "index_copy", "index_put", "cumsum"}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_written_where_one_inner_tensor_refuses(name):
    made, write = REFUSED[name]
    x = made()
    before, version = held_by(x), x.number._version
    words = None if name in DTYPE else r"can't be cast|not implemented for 'Long'"
    with pytest.raises((RuntimeError, IndexError), match=WORDS.get(name.partition(",")[0], words)):
        write(x)
    assert (held_by(x), x.number._version) == (before, version)


ONES = torch.ones(2, dtype=torch.int64)
# Writes that all accept, and the numbers and counts afterwards.
WRITTEN = {
    "index_fill": (lambda x: x.index_fill_(0, INDEX[1:], 9), ([4.0, 9.0], [4, 9])),
    "cumsum": (lambda x: x.cumsum_(0), ([4.0, 8.0], [4, 8])),
    "zero": (lambda x: x.zero_(), ([0.0, 0.0], [0, 0])),
    "mul, add, clamp": (lambda x: x.mul_(2).add_(ONES).clamp_(1, 8), ([8.0, 8.0], [8, 8])),
    "floor": (lambda x: x.div_(2, rounding_mode="floor"), ([2.0, 2.0], [2, 2])),
    "copy": (lambda x: x.copy_(torch.tensor([1.0, 2.0])), ([1.0, 2.0], [1, 2])),
    "compiled": (by_desugar(lambda x: x.mul_(2)), ([8.0, 8.0], [8, 8])),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_all_take_is_written(name):
    x, (write, expected) = make(), WRITTEN[name]
    write(x)
    assert held_by(x) == expected


@pytest.mark.parametrize("name", ["normal_", "uniform_", "exponential_", "log_normal_", "cauchy_"])
def test_random_numbers_that_one_dtype_refuses(name):
    """Neither the value nor the state of the generator has changed."""
    x, state = make(), torch.get_rng_state()
    with pytest.raises(RuntimeError):
        getattr(x, name)()
    assert held_by(x) == ([4.0, 4.0], [4, 4]) and torch.get_rng_state().equal(state)


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


test_equal_inner_tensors_are_not_tried = giving(
    {
        "equal": (lambda: differ(torch.ones(2), torch.zeros(2)), False),
        "sizes": (lambda: differ(torch.ones(2), torch.zeros(3)), True),
        "dtypes": (lambda: differ(torch.ones(2), torch.zeros(2, dtype=torch.int64)), True),
        "absent": (lambda: differ(torch.ones(2), None), False),
    }
)


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
    before = [held_by(x) for x in xs]
    with pytest.raises(RuntimeError):
        write(xs)
    assert [held_by(x) for x in xs] == before


def test_lists_of_other_sizes_are_written():
    xs = [make(), make((1,)), torch.ones(3)]
    torch._foreach_mul_(xs, [2, 3, 4.0])
    assert [held_by(x) for x in xs[:2]] == [([8.0, 8.0], [8, 8]), ([12.0, 12.0], [12])]
    assert xs[2].tolist() == [4.0] * 3
    xs[1].mul_(torch.tensor([3]))
    assert held_by(xs[1]) == ([36.0, 36.0], [36])
