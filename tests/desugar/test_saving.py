"""A forward saves at most as many bytes as in eager mode; a compiled function that is dropped leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import linecache
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from desugar.ir.fx_utils import output_nodes
from tests.desugar.classes import Nested, Pair, Tagged, TwoTensor, make, plain_parts
from tests.desugar.judge import assert_same_values, by_dynamo, by_pass, judge, random_like

CLASSES = [Tensor, TwoTensor, Tagged, Pair, Nested]
classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)

# ---- bytes saved for the backward ----------------------------------------------------------------------------


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves: each storage once, arguments and parameters left out."""

    def __init__(self, *known: Any) -> None:
        super().__init__(lambda t: (self.held.append(t), t)[1], lambda t: t)
        self.known, self.held = storages(known), []  # an address is not given twice while a tensor is held

    def __enter__(self) -> Saved:
        super().__enter__()
        return self

    @property
    def bytes(self) -> int:
        return sum(size for place, size in storages(self.held).items() if place not in self.known)


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    parts = [part.untyped_storage() for tensor in tensors for part in plain_parts(tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in parts}


def layer(x: Any, w: Any) -> Any:
    return (F.gelu(x @ w) + x).sin() * 2


def layers(x: Any, *weights: Any, each: Any = layer) -> Any:
    return functools.reduce(each, weights, x)


def checkpointed(of_layer: Any) -> Any:
    """The layers, each in a region of its own."""
    each = lambda x, w: checkpoint(of_layer, x, w, use_reentrant=False)  # noqa: E731
    return lambda x, *weights: layers(x, *weights, each=each)


def arguments(cls: type) -> tuple[Any, ...]:
    return tuple(make(cls, *size, grad=True) for size in ((16, 8), (8, 8), (8, 8), (8, 8)))


def measure(fn: Any, args: tuple[Any, ...]) -> tuple[int, list[Any]]:
    """(bytes saved, gradients) of one call."""
    with Saved(*args) as saved:
        out = fn(*args)
    return saved.bytes, list(
        torch.autograd.grad(out, args, random_like(out, torch.Generator().manual_seed(1)))
    )


@pytest.mark.sweep(50)
@classes
@pytest.mark.parametrize(
    ("eager", "make_fn"),
    [
        (layers, lambda: by_pass(layers)),
        (layers, lambda: by_dynamo(layers)),
        (checkpointed(layer), lambda: by_pass(checkpointed(layer))),
        (checkpointed(layer), lambda: by_dynamo(checkpointed(layer))),
        (checkpointed(layer), lambda: checkpointed(by_pass(layer))),
    ],
    ids=["none", "none, dynamo", "inside", "inside, dynamo", "outside"],
)
def test_no_more_bytes_are_saved_than_in_eager_mode(cls, eager, make_fn):
    args, fn = arguments(cls), make_fn()
    expected, wanted = measure(eager, args)
    for _ in range(2):
        found, gradients = measure(fn, args)
        assert found <= expected
        assert_same_values(gradients, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(4)
@classes
def test_the_program_tells_what_it_saves(cls):
    """Its figure, and the results that are saved besides, are what autograd is given."""
    compiled = by_pass(layers)
    found, _ = measure(compiled, arguments(cls))
    (program,) = compiled.programs
    sizes = [node.meta["val"].nbytes for node in output_nodes(program.forward)]
    assert program.saved_bytes == sum(sizes[program.spec.split.num_forward :])
    assert program.saved_bytes <= found <= sum(sizes)


def test_a_value_in_a_result_is_not_saved_twice():
    compiled, x = by_pass(lambda x: (lambda y: (y, y.sin()))(x.exp())), make(Pair, 4, 4, grad=True)
    with Saved(x) as saved:
        outs = compiled(x)
    assert compiled.programs[0].saved_bytes == 0
    assert saved.bytes == sum(part.untyped_storage().nbytes() for part in plain_parts(outs[0]))


def test_nothing_is_saved_where_nothing_is_needed():
    with Saved() as saved:
        by_pass(lambda x, y: x * 3 + y)(*(make(Pair, 4, 4, grad=True) for _ in "xy"))
    assert (saved.bytes, saved.held) == (0, [])


def test_saved_tensor_hooks_of_the_function_itself_still_run():
    def fn(x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            y = x * x
        return checkpoint(layer, y, y, use_reentrant=False) * x

    judge(fn, lambda: (torch.randn(4, 4, requires_grad=True),), rtol=1e-4, atol=1e-5)


# ---- nothing is kept -----------------------------------------------------------------------------------------


def cycle(n: int) -> list[weakref.ref]:
    """Compiles a function, runs and differentiates it, maybe twice, and drops it."""
    module, x = nn.Linear(2, 2), make(Pair, 2, 2, grad=True)
    compiled = by_pass(lambda x: module(x * (n % 3 + 1)).sin())
    out = compiled(x)
    out.backward(torch.ones_like(out))
    if n % 3 == 0:  # a backward that is compiled late
        (grad,) = torch.autograd.grad(compiled(x), x, torch.ones_like(out), create_graph=True)
        torch.autograd.grad(grad, x, torch.ones_like(grad))
    program = compiled.programs[0]
    torch.compiler.reset()  # Dynamo keeps what it compiled with the code of the function
    graphs = program.joint, program.forward, program.backward
    return [weakref.ref(o) for o in (compiled, program, *graphs, program.variants, x, module)]


@pytest.mark.parametrize("count", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_compiling_and_dropping_leaves_nothing(count):
    for n in range(3):
        cycle(n)
    texts, objects = kept()
    refs = [ref for n in range(count) for ref in cycle(n)]
    now = kept()
    assert sum(ref() is not None for ref in refs) == 0
    assert now[0] <= texts and now[1] <= objects  # earlier tests' may go meanwhile


def kept() -> tuple[set[str], int]:
    """The names in linecache without a file, and the number of graphs, nodes and tensors.

    Collects until nothing more goes: Dynamo's C++ records hold code that the collector does not see through.
    """
    while gc.collect():
        pass
    names = {name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}
    return names, sum(
        issubclass(type(o), (fx.Node, fx.Graph, fx.GraphModule, Tensor)) for o in gc.get_objects()
    )
