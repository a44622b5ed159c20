"""Compares compiled calls with eager mode: records everything that a caller can see."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import desugar
from desugar import DesugarError
from subclasses import TensorSubclass
from subclasses.spec.values import is_differentiable
from tests.desugar.classes import metadata, plain_parts
from tests.doors import by_desugar, by_stock, by_torch

# ------------------------------------------------------------------------------------------- ways to compile


def by_pass(fn: Any, **options: Any) -> Any:
    """The pass, its graphs run as they are."""
    return desugar.compile(fn, **{"backend": "eager"} | options)


def by_dynamo(fn: Any, **options: Any) -> Any:
    """The pass behind Dynamo, its graphs run as they are."""
    return torch.compile(fn, backend="desugar", fullgraph=True, options={"backend": "eager"}, **options)


def inside(fn: Any, *, backend: str = "inductor", fullgraph: bool = False, **options: Any) -> Any:
    """The pass behind Dynamo, its graphs compiled by a backend."""
    return torch.compile(fn, backend="desugar", options={"backend": backend} | options, fullgraph=fullgraph)


DOORS = {"desugar.compile": by_desugar, "torch.compile": by_torch}
WAYS = {"pass": by_pass, "dynamo": by_dynamo}
# By a backend for the plain graphs.
BACKEND_DOORS = {"desugar.compile": desugar.compile, "backend": inside}
STRICT_DOORS = {
    name: functools.partial(door, backend="eager", strict=True) for name, door in BACKEND_DOORS.items()
}

# -------------------------------------------------------------------------------------- the record of a call


def leaves_of(value: Any) -> list[Any]:
    return optree.tree_leaves(value, none_is_leaf=True)


def facts(leaf: Any) -> Any:
    """Everything about one leaf but its values."""
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    parts = [(tuple(part.size()), tuple(part.stride()), part.dtype) for part in plain_parts(leaf)]
    outer = tuple(leaf.size()), tuple(leaf.stride()), leaf.dtype
    grad = leaf.requires_grad, leaf.grad_fn is not None, leaf.is_leaf, leaf.is_inference()
    return metadata(leaf), outer, parts, grad


def aliasing(leaves: Sequence[Any]) -> list[int]:
    """Per plain tensor inside the leaves the number of the first one with the same storage."""
    first: dict[int, int] = {}
    parts = [part for leaf in leaves if isinstance(leaf, Tensor) for part in plain_parts(leaf)]
    return [first.setdefault(part.untyped_storage()._cdata, n) for n, part in enumerate(parts)]


def identities(leaves: Sequence[Any]) -> list[int]:
    """Per leaf the number of the first one that is the same object (tensors only)."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), n) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]


def assert_same_values(got: Sequence[Any], want: Sequence[Any], **tolerance: Any) -> None:
    """Type, metadata, sizes, strides, dtype and values of every leaf."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert facts(g) == facts(w), f"got {facts(g)}, expected {facts(w)}"
        if isinstance(g, Tensor):
            for part, wanted in zip(plain_parts(g), plain_parts(w), strict=True):
                torch.testing.assert_close(part, wanted, equal_nan=True, **tolerance)


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """Version counters; an inference tensor has none."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def backward(result: Any, missing: Sequence[int] = (), seed: int = 1) -> None:
    """Random tangents of the right type for every result that takes part, into `.grad` of the leaves."""
    outs = [leaf for leaf in tensors_of(result) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    tangents = [as_cotangents(random_like(out, generator)) for out in outs]
    kept = [n for n in range(len(outs)) if n not in missing]
    if kept:
        torch.autograd.backward([outs[n] for n in kept], [tangents[n] for n in kept])


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of the same type, metadata and strides with random content."""
    with torch.no_grad():
        out = x.detach().clone()
        for part in plain_parts(out):
            if part.is_floating_point():
                part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    return out


def as_cotangents(x: Any) -> Any:
    """The cotangent with the inner tensors of a value of a declared class; any other tensor."""
    if not isinstance(x, TensorSubclass):
        return x
    inners = {f.name: x.__dict__[f.attribute] for f in type(x).__spec__.inners}
    return x.cotangent(**{n: as_cotangents(t) for n, t in inners.items() if is_differentiable(t)})


def judge(  # noqa: PLR0913 - one option for each variation of a test
    fn: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    compiled: Any = None,
    *,
    missing: Sequence[int] = (),
    way: Callable[..., Any] = by_pass,
    around: Callable[[], Any] = contextlib.nullcontext,
    calls: int = 1,
    **tolerance: Any,
) -> Any:
    """Calls `fn` and its compiled function on equal arguments; compares all that a caller can see.

    Args:
        fn: The function.
        make: Makes the arguments; called once per side under the same seed.
        compiled: The function to compare with `fn`; by default `way(fn)`.
        missing: Numbers of the differentiable results that get no tangent.
        way: How to compile.
        around: A context manager for the calls, made anew for each.
        calls: How often the compiled function is called, on fresh arguments each time.
        tolerance: For `torch.testing.assert_close`.

    Returns:
        The compiled function.
    """
    compiled = way(fn) if compiled is None else compiled
    for _ in range(calls):
        state = torch.get_rng_state()
        sides = []
        for function in (fn, compiled):
            torch.set_rng_state(state)
            args = make()
            with around():
                result = function(*args)
            backward(result, missing)
            sides.append((tensors_of(args), leaves_of(result)))
        (want_args, want), (args, got) = sides
        assert_same_values(got, want, **tolerance)
        assert_same_values(args, want_args, **tolerance)
        assert identities([*args, *got]) == identities([*want_args, *want])
        assert aliasing([*args, *got]) == aliasing([*want_args, *want])
        assert versions(args) == versions(want_args)
        assert_same_gradients(args, want_args, **tolerance)
    return compiled


def assert_same_gradients(args: Sequence[Tensor], wanted: Sequence[Tensor], **tolerance: Any) -> None:
    """`.grad` of every argument, None included."""
    got = [arg.grad if arg.is_leaf else None for arg in args]
    want = [arg.grad if arg.is_leaf else None for arg in wanted]
    assert [g is None for g in got] == [w is None for w in want]
    assert_same_values([g for g in got if g is not None], [w for w in want if w is not None], **tolerance)


# ---- how many programs calls make ----------------------------------------------------------------------------


def assert_programs(
    fn: Callable[..., Any], calls: Sequence[Any], count: int, around: Sequence[Any] = (), **options: Any
) -> Any:
    """Every call is right, twice over, and `count` programs are compiled.

    Args:
        fn: The function.
        calls: Per call what makes its arguments.
        count: How many programs there are in the end.
        around: Per call a context manager, made anew for each.
        options: For `desugar.compile`.
    """
    compiled = by_pass(fn, **options)
    for _ in range(2):
        for n, make_args in enumerate(calls):
            judge(fn, make_args, compiled, around=around[n] if around else contextlib.nullcontext)
    assert len(compiled.programs) == count, [str(program) for program in compiled.programs]
    return compiled


# ---- graphs that desugar refuses: the error of each way to compile, and the unchanged state --------------------


def strictly(fn):
    """`desugar.compile`, which raises instead of passing a graph to AOTAutograd."""
    return by_pass(fn, strict=True)


EVERY_DOOR = pytest.mark.parametrize("door", [strictly, *DOORS.values()])
BOTH_DOORS = pytest.mark.parametrize("door", [strictly, DOORS["torch.compile"]])


def warned(caplog):
    """The warnings about graphs that desugar has handed over."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "desugar" and record.levelno >= logging.WARNING
    ]


def snapshot(args):
    """All that a refused call may not change."""
    tensors = tensors_of(args)
    parts = [part for tensor in tensors for part in plain_parts(tensor)]
    return (
        [metadata(t) for t in tensors],
        [(tuple(t.size()), tuple(t.stride()), t.requires_grad, t.grad is None) for t in tensors],
        versions(tensors),
        versions(parts),
        [id(part) for part in parts],
        [part.tolist() for part in parts],
    )


def assert_refused(fn, make_args, match, *, way=strictly, works=None):
    """Every call raises, and leaves arguments and modes alone; the compiled function still works on other arguments."""
    args = make_args()
    before, modes = snapshot(args), (torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack())
    compiled = way(fn)
    for _ in range(2):
        with pytest.raises(DesugarError, match=match) as caught:
            compiled(*args)
        assert snapshot(args) == before
    assert (torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack()) == modes
    assert compiled.programs == []
    assert "\n  instead: " in str(caught.value)
    if works is not None:
        judge(fn, works, compiled)
    return caught.value


def assert_handed_over(fn, make_args, match, caplog, **options):
    """With `strict`, the call raises; the other two ways are right, and warn."""
    with options.get("around", contextlib.nullcontext)():
        error = assert_refused(fn, make_args, match)
    assert not error.stock_is_wrong
    for door in DOORS.values():
        torch.compiler.reset()
        caplog.clear()
        judge(fn, make_args, way=door, calls=2, **options)
        assert any("AOTAutograd compiles this graph instead" in m and error.what in m for m in warned(caplog))
    return error


def assert_wrong_everywhere(fn, make_args, match):
    """All three ways raise, and PyTorch's own compiler fails or is wrong."""
    for way in (by_pass, strictly):
        error = assert_refused(fn, make_args, match, way=way)
        assert error.stock_is_wrong
    args = make_args()
    before = snapshot(args)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match) as caught:
        DOORS["torch.compile"](fn)(*args)
    assert isinstance(caught.value.inner_exception, DesugarError) and snapshot(args) == before
    with pytest.raises((AssertionError, RuntimeError)):
        judge(fn, make_args, way=by_stock)
    return error


def unlooked_at(fn):
    """The function as one node of Dynamo's graph: its Python runs in the trace of desugar."""
    return torch._dynamo.nonstrict_trace(fn)


@contextlib.contextmanager
def switched(switch: Callable[[Any], Any], to: Any, back: Any) -> Iterator[None]:
    """Calls a switch with one value for a while, and then with its old value."""
    switch(to)
    try:
        yield
    finally:
        switch(back)
