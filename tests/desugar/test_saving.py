"""What is kept: bytes saved for the backward, at most eager's; and nothing at all of compiled functions dropped."""

from __future__ import annotations

import gc
import linecache
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import desugar
from desugar.ir.fx_utils import output_nodes
from tests.desugar.classes import Nested, Pair, Tagged, TwoTensor, make, plain_parts
from tests.desugar.judge import assert_same_values, by_dynamo, by_pass, judge, random_like

CLASSES = [Tensor, TwoTensor, Tagged, Pair, Nested]
classes = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)

# ---- bytes saved for the backward ----------------------------------------------------------------------------


class Saved:
    """Counts the bytes that autograd saves: each storage once, arguments and parameters left out."""

    def __init__(self, *known: Any) -> None:
        parts = [part for tensor in known for part in plain_parts(tensor)]
        self.known = {part.untyped_storage().data_ptr() for part in parts}
        self.storages: dict[int, int] = {}
        self.packed = 0

    def __enter__(self) -> Saved:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hooks.__exit__(*exc)

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.storages[storage.data_ptr()] = storage.nbytes()
        self.held = [*getattr(self, "held", []), tensor]  # an address is not given twice while it is held
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


def layer(x: Any, w: Any) -> Any:
    return (F.gelu(x @ w) + x).sin() * 2


def layers(x: Any, *weights: Any) -> Any:
    for w in weights:
        x = layer(x, w)
    return x


def checkpointed(x: Any, *weights: Any) -> Any:
    for w in weights:
        x = checkpoint(layer, x, w, use_reentrant=False)
    return x


def arguments(cls: type) -> tuple[Any, ...]:
    return tuple(make(cls, *size, grad=True) for size in ((16, 8), (8, 8), (8, 8), (8, 8)))


def measure(fn: Any, args: tuple[Any, ...]) -> tuple[int, list[Any]]:
    """(bytes saved, gradients) of one call."""
    with Saved(*args) as saved:
        out = fn(*args)
    tangent = random_like(out, torch.Generator().manual_seed(1))
    return saved.bytes, list(torch.autograd.grad(out, args, tangent))


def outside(compiled: Any) -> Any:
    def fn(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = checkpoint(compiled, x, w, use_reentrant=False)
        return x

    return fn


@pytest.mark.sweep(10)
@classes
@pytest.mark.parametrize("around", ["none", "inside", "outside"])
def test_no_more_bytes_are_saved_than_in_eager_mode(cls, around):
    args = arguments(cls)
    eager = {"none": layers, "inside": checkpointed, "outside": checkpointed}[around]
    fn = outside(by_pass(layer)) if around == "outside" else by_pass(eager)
    expected, wanted = measure(eager, args)
    for _ in range(2):
        found, gradients = measure(fn, args)
        assert found <= expected
        assert_same_values(gradients, wanted, rtol=1e-4, atol=1e-5)


def test_behind_dynamo_too():
    args = arguments(Pair)
    for eager in (layers, checkpointed):
        expected, _ = measure(eager, args)
        fn = by_dynamo(eager)
        fn(*args)
        assert measure(fn, args)[0] <= expected


@pytest.mark.sweep(3)
@classes
def test_a_checkpoint_inside_is_kept(cls):
    """Its intermediates are computed again, not saved."""
    args = arguments(cls)
    whole, lean = by_pass(layers), by_pass(checkpointed)
    plain, spared = measure(whole, args)[0], measure(lean, args)[0]
    assert spared <= plain
    assert lean.programs[0].saved_bytes <= measure(checkpointed, args)[0]


@pytest.mark.sweep(4)
@classes
def test_the_program_tells_what_it_saves(cls):
    """Its figure, and the results that are saved besides, are what autograd is given."""
    args = arguments(cls)
    compiled = by_pass(layers)
    found, _ = measure(compiled, args)
    (program,) = compiled.programs
    split = program.variants.partitioned
    extra = output_nodes(program.forward)[split.num_forward :]
    assert program.saved_bytes == sum(node.meta["val"].nbytes for node in extra)
    results = sum(node.meta["val"].nbytes for node in output_nodes(program.forward)[: split.num_forward])
    assert program.saved_bytes <= found <= program.saved_bytes + results


def test_a_value_in_a_result_is_not_saved_twice():
    args = (make(Pair, 4, 4, grad=True),)

    def fn(x):
        y = x.exp()
        return y, y.sin()

    compiled = by_pass(fn)
    with Saved(*args) as saved:
        outs = compiled(*args)
    assert compiled.programs[0].saved_bytes == 0
    assert saved.bytes == sum(part.untyped_storage().nbytes() for part in plain_parts(outs[0]))


def test_nothing_is_saved_where_nothing_is_needed():
    args = (make(Pair, 4, 4, grad=True), make(Pair, 4, 4, grad=True))
    with Saved() as saved:
        by_pass(lambda x, y: x * 3 + y)(*args)
    assert (saved.bytes, saved.packed) == (0, 0)


def test_saved_tensors_on_the_cpu():
    x, w = make(TwoTensor, 4, 4, grad=True), make(TwoTensor, 4, 4, grad=True)
    with torch.autograd.graph.save_on_cpu():
        got = torch.autograd.grad(by_pass(layer)(x, w).sum(), (x, w))
    assert_same_values(got, torch.autograd.grad(layer(x, w).sum(), (x, w)), rtol=1e-4, atol=1e-5)


def noisy(x: Any) -> Any:
    return F.dropout(x, 0.5) * x.exp()


@pytest.mark.sweep(10)
@classes
@pytest.mark.parametrize("reused", [False, True])
def test_random_numbers_inside_a_checkpoint_are_drawn_once(cls, reused):
    """The backward has the masks of its forward; each call has masks of its own."""

    def fn(x: Any) -> Any:
        y = checkpoint(noisy, x, use_reentrant=False)
        return checkpoint(noisy, y, use_reentrant=False) if reused else y

    judge(fn, lambda: (make(cls, 8, 8, grad=True),), calls=3, rtol=1e-4, atol=1e-5)
    compiled, x = by_pass(fn), make(cls, 8, 8, grad=True)
    first, second = (plain_parts(compiled(x))[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_saved_tensor_hooks_of_the_function_itself_still_run():
    def fn(x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            y = x * x
        return checkpoint(layer, y, y, use_reentrant=False) * x

    judge(fn, lambda: (torch.randn(4, 4, requires_grad=True),), rtol=1e-4, atol=1e-5)


# ---- nothing is kept -----------------------------------------------------------------------------------------


def cycle(n: int) -> list[weakref.ref]:
    """Compiles a function, runs and differentiates it, drops it."""
    module = nn.Linear(2, 2)
    compiled = desugar.compile(lambda x: module(x * (n % 3 + 1)).sin(), backend="eager")
    x = make(Pair, 2, 2, grad=True)
    out = compiled(x)
    out.backward(torch.ones_like(out))
    program = compiled.programs[0]
    torch.compiler.reset()  # Dynamo keeps what it compiled with the code of the function
    return [weakref.ref(o) for o in (compiled, program, program.joint, program.variants, x, module)]


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
def test_compiling_and_dropping_leaves_nothing(count):
    for n in range(3):
        cycle(n)
    collect_all()
    texts, kept = generated_texts(), graph_objects()
    refs = [ref for n in range(count) for ref in cycle(n)]
    collect_all()
    assert sum(ref() is not None for ref in refs) == 0
    assert generated_texts() <= texts  # earlier tests' may go meanwhile
    assert graph_objects() <= kept


def collect_all() -> None:
    """Collects until nothing more goes: Dynamo's C++ records hold code that the collector does not see through."""
    while gc.collect():
        pass


def generated_texts() -> set[str]:
    """Names in linecache that are no files."""
    return {name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}


def graph_objects() -> int:
    """How many graphs, nodes and tensors there are."""
    return sum(issubclass(type(o), (fx.Node, fx.Graph, fx.GraphModule, Tensor)) for o in gc.get_objects())


@pytest.mark.slow
def test_a_member_compiled_late_goes_too():
    def once() -> set[str]:
        compiled = by_pass(lambda x: (x.sin(), x * x))
        x = make(Pair, 2, grad=True)
        first, second = compiled(x)
        first.backward(torch.ones_like(first), retain_graph=True)
        (g,) = torch.autograd.grad(second, x, torch.ones_like(second), create_graph=True)
        torch.autograd.grad(g, x, torch.ones_like(g))
        del compiled, first, second, g
        gc.collect()
        return generated_texts()

    assert once() >= once()
