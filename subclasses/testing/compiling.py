"""Promises about compilers: each gives what eager mode gives, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from subclasses.testing.cases import VIEWS, Case, accepted, applicable, recorded
from subclasses.testing.gradients import live, ones_for
from subclasses.testing.nesting import Nest
from subclasses.testing.paths import against_eager, compilers
from subclasses.testing.promise import Attempt, Broken, Skipped, promise, shown
from subclasses.testing.subject import Compile, Subject


def _together(cases: Sequence[Case]) -> Callable[[Any], Any]:
    """One function that runs all cases, for one compilation."""
    runs = [case.run for case in cases]
    return lambda x: [run(x) for run in runs]


# ---- values ------------------------------------------------------------------------------------------------


@promise(
    "flatten, unflatten and rules must be traceable: no data-dependent Python, no state outside the inner tensors "
    "and the context, the same metadata for a fake as for a real value"
)
def compiled_values(s: Subject) -> None:
    """A compiled op gives what it gives in eager mode."""
    cases = [c for c in accepted(s) if c.name not in VIEWS] or [Case("x.clone()", lambda x: x.clone())]
    with torch.no_grad():
        expected = [case.run(s.make()) for case in cases]
        for path, compile in compilers(s):
            with Attempt() as attempt:
                against_eager(
                    s,
                    "all ops at once",
                    path,
                    lambda c=compile: c(_together(cases))(s.make()),
                    expected,
                    note=False,
                )
            refused = len(s.refused)
            if attempt.error is not None:
                _one_by_one(s, path, compile, list(zip(cases, expected, strict=True)))
                if len(s.refused) == refused:
                    raise attempt.error


def _one_by_one(s: Subject, path: str, compile: Compile, pairs: list[tuple[Case, Any]]) -> None:
    """Finds the op that breaks, or notes those that are refused; a broken half is looked at in halves."""
    if len(pairs) > 1:
        torch.compiler.reset()
        half = len(pairs) // 2
        for part in (pairs[:half], pairs[half:]):
            with Attempt() as attempt:
                cases, expected = [c for c, _ in part], [e for _, e in part]
                run = _together(cases)
                against_eager(s, "", path, lambda run=run: compile(run)(s.make()), expected, note=False)
            if attempt.error is not None:
                _one_by_one(s, path, compile, part)
        return
    ((case, expected),) = pairs
    torch.compiler.reset()
    against_eager(s, case.name, path, lambda: compile(case.run)(s.make()), expected)


def _double(x: Any) -> Any:
    x.mul_(2)
    return x + x


@promise("an in-place op must write into the inner tensors; see the promise `mutation`")
def compiled_mutation(s: Subject) -> None:
    """A compiled function that writes to its argument does so, as in eager mode."""
    x = s.make()
    with torch.no_grad():
        works, out = s.works("x.mul_(2); x + x", lambda: _double(x))
        if not works:
            return
        expected = [x, out]

        def run(compile: Compile) -> Any:
            value = s.make()
            return [value, compile(_double)(value)]

        for path, compile in compilers(s):
            against_eager(s, "x.mul_(2); x + x", path, lambda c=compile: run(c), expected)


@promise(
    "a view must share its storage with its base (see the promise `views`), and a class with rules for views needs one "
    "for as_strided, with which PyTorch remakes a view of an argument; the outer storage offset must fit"
)
def compiled_views(s: Subject) -> None:
    """A view that a compiled function gives back is one of its argument, as in eager mode."""
    names = ("x.view(x.shape)", "x[1:]", "x.transpose(0, -1)", "x.unsqueeze(0)")
    for case in applicable(s, {name: VIEWS[name] for name in names}):
        with torch.no_grad():
            works, expected = s.works(case.name, lambda case=case: _write_to_view(s, case.run))
            if not works:
                continue
            for path, compile in compilers(s):
                run = lambda c=compile, case=case: _write_to_view(s, c(case.run))  # noqa: E731
                against_eager(s, f"{case.name}.mul_(2)", path, run, expected)


def _write_to_view(s: Subject, view: Callable[[Any], Any]) -> Any:
    """A value and its view, after a write to the view where the class takes writes."""
    x = s.make()
    out = view(x)
    if isinstance(out, s.cls):
        s.works("a write to a view", lambda: out.mul_(2))
    return [x, out]


@promise(
    "as_strided counts from the start of the storage: shift its offset for each inner tensor by where that one starts, "
    "and refuse strides that are not its own"
)
def compiled_offsets(s: Subject) -> None:
    """Inner tensors that start at different places in their storages give right views when compiled."""
    x = s.make().detach()
    inners = {n: _moved(t, i) for i, (n, t) in enumerate(s.inners(x).items())}
    with Attempt() as attempt:
        s.construct(x, inners)
    if isinstance(attempt.error, Skipped):
        raise attempt.error
    if attempt.error is not None:
        s.refused.append(f"inner tensors with offsets: {shown(attempt.error)}")
        return
    for case in applicable(s, {name: VIEWS[name] for name in ("x.view(x.shape)", "x[1:]")}):
        with torch.no_grad():
            works, expected = s.works(case.name, lambda case=case: case.run(s.construct(x, inners)))
            for path, compile in compilers(s) if works else ():
                if not _remakes_views(compile, case):
                    s.refused.append(f"{path} remakes views at a wrong offset on this release of PyTorch")
                    continue
                run = lambda c=compile, case=case: c(case.run)(s.construct(x, inners))  # noqa: E731
                against_eager(s, f"{case.name} with offsets", path, run, expected)


def _remakes_views(compile: Compile, case: Case) -> bool:
    """Whether a compiler is right for a wrapper of one tensor; torch.compile of 2.15 counts an offset twice."""
    held = torch.arange(40.0)[5:29].view(4, 6)
    expected = case.run(held)
    torch.compiler.reset()
    with Attempt() as attempt:
        if not torch.equal(compile(case.run)(Nest(held)).held, expected):
            return False
    return attempt.error is None


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
    cases = _chosen(s)
    if not cases:
        raise Skipped("no differentiable op is known to work in eager mode")
    function = _together(cases)
    for kind in ("plain", "of the class", "missing"):
        works, expected = s.works(f"{kind} tangents", lambda: _gradient(s, function, kind))  # noqa: B023
        if not works:
            continue
        for path, compile in compilers(s):
            what = f"the gradient with tangents {kind}"
            against_eager(s, what, path, lambda c=compile: _gradient(s, c(function), kind), expected)  # noqa: B023


def _chosen(s: Subject) -> list[Case]:
    """A few differentiable ops of different kinds: with results of the class, and plain ones."""
    if "differentiable" not in s.cache:
        found = []
        for case in recorded(s):
            with Attempt() as attempt:
                results = live(case.run(s.trainable()))
                torch.autograd.grad(results, s.trainable(), ones_for(results), allow_unused=True)
            if attempt.error is None and results:
                found.append(case)
        s.cache["differentiable"] = found
    return s.cache["differentiable"][:6]


def _gradient(s: Subject, function: Callable[[Any], Any], kind: str) -> Any:
    x = s.trainable()
    results = live(function(x))
    used = results[:1] if kind == "missing" else results
    tangents = [_tangent(s, t, kind) for t in used]
    grads = torch.autograd.grad(used, x, tangents, allow_unused=True)
    return [_as_inners(s, g) for g in grads]


def _tangent(s: Subject, result: Tensor, kind: str) -> Tensor:
    if kind == "plain" or not isinstance(result, s.cls):
        return ones_for([result])[0]
    return torch.ones_like(result.detach())


def _as_inners(s: Subject, grad: Any) -> Any:
    """A gradient's inner tensors: whether it is marked as a cotangent is the class's own affair."""
    return list(s.inners(grad).values()) if isinstance(grad, s.cls) else grad


@promise("construction must be traceable: no data-dependent checks in __new__, no __init__ that Dynamo skips")
def compiled_construction(s: Subject) -> None:
    """A value may be made from plain tensors, and taken apart, inside a compiled function."""
    x = s.make()
    if not (s.declared or s.options.get("construct")):
        raise Skipped("pass construct=, which makes a value from inner tensors")
    if any(type(t) is not Tensor for t in s.inners(x).values()):
        raise Skipped("the inner tensors are not plain")
    build, names = s.builder(x)
    parts = [t for n, t in s.inners(x).items() if n in names]

    def make(*parts: Any) -> Any:
        value = build(*parts)
        return value.clone(), [getattr(value, name) * 2 for name in names]

    works, expected = s.works("construction", lambda: make(*parts))
    for path, compile in compilers(s) if works else ():
        against_eager(s, "construction", path, lambda c=compile: c(make)(*parts), expected)


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
def dynamic_shapes(s: Subject) -> None:
    """Values of several sizes run through one dynamic program."""
    factories = [s.factory, *s.options.get("sizes", ())]
    if len(factories) < 3:
        raise Skipped("pass sizes=[...], at least two factories of values of other sizes")
    function = _together([c for c in accepted(s) if _takes_all(s, c, factories)][:8])
    with torch.no_grad():
        for path, compile in compilers(s):
            compiled = compile(function)
            for i, factory in enumerate(factories):
                expected = function(s.make(factory))
                run = _third_size(s, path, lambda c=compiled, f=factory: c(s.make(f)), i)
                against_eager(s, f"size number {i}", path, run, expected)


def _third_size(s: Subject, path: str, run: Callable[[], Any], index: int) -> Callable[[], Any]:
    def guarded() -> Any:
        with _no_new_program(path):
            return run()

    return guarded if index >= 2 else run


def _takes_all(s: Subject, case: Case, factories: Sequence[Any]) -> bool:
    with Attempt() as attempt, torch.no_grad():
        for factory in factories:
            case.run(s.make(factory))
    return attempt.error is None


@promise(
    "compare the whole metadata in the context's == and in __metadata_guard__: a program that was compiled for one "
    "value must not run on another"
)
def metadata_guard(s: Subject) -> None:
    """A value with other metadata does not run a program that was compiled for another."""
    factories = [s.factory, *s.options.get("variants", ())]
    if len(factories) < 2:
        raise Skipped("pass variants=[...], factories of values with other metadata")
    cases = [c for c in accepted(s) if _takes_all(s, c, factories)][:8]
    function = _together(cases)
    with torch.no_grad():
        for path, compile in compilers(s):
            compiled = compile(function)
            for i in (*range(len(factories)), 0):
                expected = function(s.make(factories[i]))
                what = f"variant {i} after others"
                against_eager(s, what, path, lambda c=compiled, i=i: c(s.make(factories[i])), expected)


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
def compiled_module(s: Subject) -> None:
    """A compiled module with a parameter of the class gives what it gives in eager mode."""
    case = next(iter(accepted(s)), None)
    if case is None:
        raise Skipped("no op is known to work in eager mode")
    module = Module(s.make().detach(), case.run)
    with torch.no_grad():
        expected = module(torch.ones(2))
        for path, compile in compilers(s):
            against_eager(s, "a module", path, lambda c=compile: c(module)(torch.ones(2)), expected)


@promise(
    "torch.export takes a parameter apart by __tensor_flatten__: ops on it must give plain tensors in the end, "
    "and a class that is constructed inside needs a constructor that Dynamo traces"
)
def exported(s: Subject) -> None:
    """torch.export takes a module with a parameter of the class, where an op on it gives a plain tensor."""
    case = next((c for c in accepted(s) if _is_plain(s, c)), None)
    if case is None:
        raise Skipped("no op gives a plain tensor, and torch.export takes no other results")
    module = Module(s.make().detach(), case.run)
    with torch.no_grad():
        expected = module(torch.ones(2))
        run = lambda: torch.export.export(module, (torch.ones(2),)).module()(torch.ones(2))  # noqa: E731
        against_eager(s, f"a module with {case.name}", "torch.export", run, expected)


def _is_plain(s: Subject, case: Case) -> bool:
    with torch.no_grad():
        return type(case.run(s.make())) is Tensor
