"""Compiled calls: each gives the result of eager mode, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subclasses.errors import one_of
from subclasses.testing import derive
from subclasses.testing.cases import CLONE, VIEWS, accepted, applicable, stand_ins
from subclasses.testing.compare import leaves
from subclasses.testing.compilers import against_eager, check_compiled, compilers
from subclasses.testing.errors import Attempt, Broken, Refused, Skipped, shown, succeeds
from subclasses.testing.properties.gradients import differentiable, live, ones_for
from subclasses.testing.properties.nesting import Nest
from subclasses.testing.property import Case, promise
from subclasses.testing.subject import Compile, Factory, Subject, is_differentiable


def _together(cases: Sequence[Case]) -> Callable[[Any], Any]:
    """One function that runs all cases, so that they compile together."""
    runs = [case.run for case in cases]
    return lambda x: [run(x) for run in runs]


# ---- values ------------------------------------------------------------------------------------------------


@promise(
    "flatten, unflatten and rules must be traceable: no data-dependent Python, no state outside the inner tensors "
    "and the context, the same metadata for a fake as for a real value"
)
@torch.no_grad()
def compiled_values(s: Subject) -> None:
    """A compiled op gives what it gives in eager mode."""
    cases = [c for c in accepted(s) if not _is_view(s, c)] or [CLONE]
    pairs = [(case, case.run(s.make())) for case in cases]
    # An op that writes to the value gets one of its own.
    together = [pair for pair in pairs if not _writes(pair[0])]
    groups = [group for group in (together, *([pair] for pair in pairs if _writes(pair[0]))) if group]
    for path, compile in compilers(s):
        for group in groups:
            _compare_group(s, path, compile, group)


def _is_view(s: Subject, case: Case) -> bool:
    """Whether a case gives a view of a plain tensor; `compiled_views` is about those."""
    if case.name in VIEWS:
        return True
    plain = stand_ins(s)[0]
    results: list[Any] = []
    with Attempt():
        results = leaves(case.run(plain))
    return any(isinstance(r, Tensor) and r._is_view() and r._base is plain for r in results)


def _writes(case: Case) -> bool:
    """Whether a case calls an op in place, such as ``add_.Tensor``."""
    return case.name.partition(".")[0].endswith("_")


def _compare_group(s: Subject, path: str, compile: Compile, pairs: Sequence[tuple[Case, Any]]) -> None:
    with Attempt() as attempt:
        _all_at_once(s, f"all ops at once under {path}", compile, pairs)
    refused = len(s.refused)
    if attempt.error is not None:
        _one_by_one(s, path, compile, pairs)
        if len(s.refused) == refused:
            raise attempt.error


def _all_at_once(s: Subject, what: str, compile: Compile, pairs: Sequence[tuple[Case, Any]]) -> None:
    cases, expected = zip(*pairs, strict=True)
    against_eager(s, what, lambda: compile(_together(cases))(s.make()), list(expected), note=False)


def _one_by_one(s: Subject, path: str, compile: Compile, pairs: Sequence[tuple[Case, Any]]) -> None:
    """Bisects the cases: raises for one that differs, and notes those that are refused."""
    torch.compiler.reset()
    if len(pairs) == 1:
        ((case, expected),) = pairs
        against_eager(s, f"{case.name} under {path}", lambda: compile(case.run)(s.make()), expected)
        return
    half = len(pairs) // 2
    for part in (pairs[:half], pairs[half:]):
        if not succeeds(_all_at_once, s, "", compile, part):
            _one_by_one(s, path, compile, part)


# ---- mutation and views ------------------------------------------------------------------------------------


def _double(x: Any) -> Any:
    x.mul_(2)
    return x + x


@promise("an in-place op must write into the inner tensors; see the promise `mutation`")
@torch.no_grad()
def compiled_mutation(s: Subject) -> None:
    """A compiled function that writes to its argument does so, as in eager mode."""

    def run(compile: Compile) -> Any:
        x = s.make()
        return [x, compile(_double)(x)]

    check_compiled(s, "x.mul_(2); x + x", run)


def _views(s: Subject, *names: str) -> list[Case]:
    return applicable(s, {name: VIEWS[name] for name in names})


@promise(
    "a view must share its storage with its base (see the promise `views`), and a class with rules for views needs one "
    "for as_strided, with which PyTorch remakes a view of an argument by its sizes and strides; the outer storage "
    "offset must fit, and so must the strides: a rule for a view that changes metadata alone needs an `outer` that "
    "gives them",
    cases=lambda s: _views(s, "x.view(x.shape)", "x[1:]", "x.transpose(0, -1)", "x.unsqueeze(0)"),
)
@torch.no_grad()
def compiled_views(s: Subject, case: Case) -> None:
    """A view that a compiled function gives back is one of its argument, as in eager mode."""

    def run(compile: Compile) -> Any:
        x = s.make()
        out = compile(case.run)(x)
        if isinstance(out, s.cls):
            s.works("a write to a view", lambda: out.mul_(2))
        return [x, out]

    check_compiled(s, f"{case.name}.mul_(2)", run)


@promise(
    "as_strided counts from the start of the storage: shift its offset for each inner tensor by where that one starts, "
    "and refuse strides that are not its own",
    cases=lambda s: _views(s, "x.view(x.shape)", "x[1:]"),
)
@torch.no_grad()
def compiled_offsets(s: Subject, case: Case) -> None:
    """Inner tensors that start at different places in their storages give right views when compiled."""

    def run(compile: Compile) -> Any:
        x = s.make().detach()
        inners = {n: _moved(t, i) for i, (n, t) in enumerate(s.inners(x).items())}
        moved = s.call("inner tensors with offsets", lambda: s.construct(x, inners), any_error=True)
        if not _remakes_views(compile, case):
            raise Refused("views are remade at a wrong offset on this release of PyTorch")
        return compile(case.run)(moved)

    check_compiled(s, f"{case.name} with offsets", run)


def _remakes_views(compile: Compile, case: Case) -> bool:
    """True if a compiler is right for a wrapper of one tensor; torch.compile of 2.15 counts an offset twice."""
    held = torch.arange(40.0)[5:29].view(4, 6)
    expected = case.run(held)
    torch.compiler.reset()
    with Attempt():
        return torch.equal(compile(case.run)(Nest(held)).held, expected)
    return False


def _moved(t: Any, index: int) -> Any:
    """The same numbers, further back in a storage that has room behind them."""
    if type(t) is not Tensor:
        return t
    room = t.new_zeros(3 * t.numel() + 2 * index + 2)
    moved = room[2 * index + 1 :][: t.numel()].view(t.shape)
    return moved.copy_(t)


# ---- gradients ---------------------------------------------------------------------------------------------


@promise(
    "the tangent that arrives may be plain, of the class, or missing: see __coerce_tangent_metadata__ and "
    "__coerce_same_metadata_as_tangent__, and the promise `cotangents`"
)
def compiled_gradients(s: Subject) -> None:
    """A compiled function's gradient is that of eager mode, for every kind of tangent."""
    s.trainable()
    cases = differentiable(s)[:6]
    if not cases:
        raise Skipped("no differentiable op is known to work in eager mode")
    function = _together(cases)
    for kind in ("plain", "of the class", "missing"):
        check_compiled(s, f"the gradient with tangents {kind}", partial(_gradient, s, function, kind))


def _gradient(s: Subject, function: Callable[[Any], Any], kind: str, compile: Compile) -> Any:
    """The gradient of a compiled function, for one kind of tangents."""
    x = s.trainable()
    results = live(compile(function)(x))
    used = results[:1] if kind == "missing" else results
    tangents = [
        torch.ones_like(t.detach()) if isinstance(t, s.cls) and kind != "plain" else plain
        for t, plain in zip(used, ones_for(used), strict=True)
    ]
    grads = torch.autograd.grad(used, x, tangents, allow_unused=True)
    # A plain gradient and the one of the class are the same, if the class can convert it.
    if s.declared and _converts_cotangents(s, x):
        grads = [x.detach().wrap_cotangent(g) if type(g) is Tensor else g for g in grads]
    # The inner tensors alone: a class may mark a gradient as a cotangent in its metadata.
    return [list(s.inners(g).values()) if isinstance(g, s.cls) else g for g in grads]


def _converts_cotangents(s: Subject, x: Any) -> bool:
    """Whether ``wrap_cotangent`` has an inner tensor to differentiate ``materialize`` by."""
    can = s.cls._traits.is_representation and any(map(is_differentiable, s.inners(x).values()))
    return can and x.materialize().requires_grad


@promise("construction must be traceable: no data-dependent checks in __new__, no __init__ that Dynamo skips")
def compiled_construction(s: Subject) -> None:
    """A value may be made from plain tensors, and taken apart, inside a compiled function."""
    s.needs_flatten()
    x = s.make()
    if not (s.declared or s.options.get("construct")):
        raise Skipped(f"pass construct=, which makes {one_of(s.cls)} from {', '.join(s.inners(x))}")
    if any(type(t) is not Tensor for t in s.inners(x).values()):
        raise Skipped("the inner tensors are not plain")
    build, names = s.builder(x)
    parts = [t for n, t in s.inners(x).items() if n in names]

    def make(*parts: Any) -> Any:
        value = build(*parts)
        return value.clone(), [getattr(value, name) * 2 for name in names]

    check_compiled(s, "construction", lambda compile: compile(make)(*parts))


# ---- other values, other sizes -----------------------------------------------------------------------------


@contextmanager
def _no_new_program(path: str) -> Iterator[None]:
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if "recompile" not in str(error).lower():
            raise
        raise Broken(f"a third size makes a new program under {path}: {shown(error)}") from error


@promise(
    "derive sizes from the inner tensors or from outer_size, never from the context, and compute with them as "
    "symbols; a size that may be anything belongs among the dynamic ints"
)
@torch.no_grad()
def dynamic_shapes(s: Subject) -> None:
    """Values of several sizes run through one dynamic program."""
    factories = [s.factory, *derive.sizes(s)]
    if len(factories) < 3:
        raise Skipped("pass sizes=[...], at least two factories of values of other sizes")
    calls = [(f"size number {i}", factory) for i, factory in enumerate(factories)]
    # A class may specialize on sizes: one program is asked for where the author says that sizes vary.
    by_tensor = zip(*(_sizes(s, s.make(factory)) for factory in factories), strict=False)
    asks = s.options.get("sizes") and all(
        _vary_alike(first, second, other) for first, second, *others in by_tensor for other in others
    )
    _check_in_turn(s, calls, compiles=2 if asks else None)


def _sizes(s: Subject, x: Any) -> list[torch.Size]:
    return [x.shape, *(t.shape for t in s.inners(x).values() if isinstance(t, torch.Tensor))]


def _vary_alike(first: torch.Size, second: torch.Size, other: torch.Size) -> bool:
    """Whether a size differs from the first one in no other dims than the second, at which a program became dynamic."""
    return len(first) == len(second) == len(other) and all(
        m != n or m == k for m, n, k in zip(first, second, other, strict=True)
    )


def _check_in_turn(s: Subject, calls: Sequence[tuple[str, Factory]], compiles: int | None = None) -> None:
    """Compares calls of one compiled function, each on a value of its own factory, with eager mode.

    With ``compiles``, only so many of the calls may compile a program.
    """
    makes = [partial(s.make, factory) for _, factory in calls]
    cases = [c for c in accepted(s) if succeeds(lambda c=c: [c.run(make()) for make in makes])]
    function = _together(cases[:8])
    for path, compile in compilers(s):
        compiled = compile(function)
        for i, (what, _) in enumerate(calls):
            run = lambda make=makes[i], compiled=compiled: compiled(make())  # noqa: E731
            if compiles is not None and i >= compiles:
                run = _no_new_program(path)(run)
            against_eager(s, f"{what} under {path}", run, function(makes[i]()))


@promise(
    "compare the whole metadata in the context's == and in __metadata_guard__: a program that was compiled for one "
    "value must not run on another"
)
@torch.no_grad()
def metadata_guard(s: Subject) -> None:
    """A value with other metadata does not run a program that was compiled for another."""
    factories = [s.factory, *derive.variants(s)]
    calls = [(f"variant {i} after others", factory) for i, factory in enumerate(factories)]
    _check_in_turn(s, [*calls, calls[0]])


# ---- modules -----------------------------------------------------------------------------------------------


class Module(nn.Module):
    """A module with a value of the class as its parameter, and one op on it."""

    def __init__(self, x: Tensor, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(x, requires_grad=False)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        """The op on the parameter, and something of the argument."""
        return self.run(self.weight), x * 2


@promise("a module with a parameter of the class must be traceable; see the promise `compiled_values`")
@torch.no_grad()
def compiled_module(s: Subject) -> None:
    """A compiled module with a parameter of the class gives what it gives in eager mode."""
    case = next(iter(accepted(s)), None)
    if case is None:
        raise Skipped("no op is known to work in eager mode")
    module = Module(s.make().detach(), case.run)
    check_compiled(s, "a module", lambda compile: compile(module)(torch.ones(2)))


@promise(
    "torch.export takes a parameter apart by __tensor_flatten__: ops on it must give plain tensors in the end, "
    "and a class that is constructed inside needs a constructor that Dynamo traces"
)
@torch.no_grad()
def exported(s: Subject) -> None:
    """torch.export takes a module with a parameter of the class, where an op on it gives a plain tensor."""
    s.needs_flatten()
    case = next((c for c in accepted(s) if type(c.run(s.make())) is Tensor), None)
    if case is None:
        raise Skipped("no op gives a plain tensor, and torch.export takes no other results")
    module = Module(s.make().detach(), case.run)
    run = lambda: torch.export.export(module, (torch.ones(2),)).module()(torch.ones(2))  # noqa: E731
    against_eager(s, f"a module with {case.name} under torch.export", run, module(torch.ones(2)))
