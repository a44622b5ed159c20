"""Compiled calls: each gives the result of eager mode under every compiler, or is refused.

A case here is a function of a compiler, itself a function from a function to a compiled one. Given the identity, the
case runs in eager mode.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses.errors import one_of
from subclasses.testing import derive
from subclasses.testing.calls import CLONE, VIEWS, WHOLE, Case
from subclasses.testing.cases import accepted, applicable, live, ones_for
from subclasses.testing.errors import Broken, Skipped, problem, skip_unless, succeeds, tried
from subclasses.testing.gradients import differentiable
from subclasses.testing.structure import Holder, is_view_of_plain
from subclasses.testing.subject import Compile, Factory, Subject, check_equal, is_differentiable
from subclasses.testing.values import Nest, Setting, with_nests

# ---- which compilers ---------------------------------------------------------------------------------------


def named(target: str, **options: Any) -> Compile:
    """A compiler by its import path, looked up when it is used: one that is not installed is left out.

    Args:
        target: ``"package:function"``; the function takes the function to compile.
        **options: passed on to it; a ``backend`` of ``torch.compile`` must be registered.
    """

    def compile(fn: Callable[..., Any]) -> Callable[..., Any]:
        package = target.partition(":")[0]
        skip_unless(importlib.util.find_spec(package) is not None, f"{package} is not installed")
        backend = options.get("backend")
        skip_unless(
            package != "torch" or backend in torch.compiler.list_backends(exclude_tags=()),
            f"torch.compile has no backend {backend}",
        )
        return pkgutil.resolve_name(target)(fn, **options)

    return compile


PATHS: Mapping[str, Compile] = {
    "torch.compile": named("torch:compile", backend="aot_eager", fullgraph=True),
    "desugar.compile": named("desugar:compile", backend="eager"),
    'torch.compile(backend="desugar")': named(
        "torch:compile", backend="desugar", fullgraph=True, options={"backend": "eager"}
    ),
}
"""The compilers that are tried by default, none with Inductor."""

INDUCTOR: Mapping[str, Compile] = {
    "torch.compile with Inductor": named("torch:compile", backend="inductor", fullgraph=True),
    "desugar.compile with Inductor": named("desugar:compile", backend="inductor"),
}


EXPORT: Mapping[str, Callable[[Any], Any]] = {
    "torch.export": lambda module: torch.export.export(module, (torch.ones(2),)).module()
}


def under(
    paths: Mapping[str, Compile] | None = None, *, briefly: bool = False
) -> Callable[[Subject], list[Setting]]:
    """The context of the compilers of ``paths=``, by default of ``PATHS``, without compilers that are not installed.

    Args:
        paths: compilers that are tried unless the author passes ``paths=``.
        briefly: below the level ``full``, try the first of the default compilers alone.
    """

    def context(s: Subject) -> list[Setting]:
        given, is_full = s.options.get("paths"), s.options.get("level") == "full"
        chosen = dict(paths or PATHS) if given is None else dict({} if paths else given)
        first = 1 if briefly and given is None and not is_full else None
        return [
            Setting(partial(WHOLE.run, compile), f" under {name}")
            for name, compile in [*chosen.items()][:first]
            if paths is EXPORT or not isinstance(tried(compile, lambda: None)[1], Skipped)
        ]

    return context


def by_compiler(s: Subject, case: Case, setting: Setting) -> None:
    """Raises unless a compiled case gives the result of eager mode, or is refused; a group is bisected then."""
    works, expected = s.works(case.name, lambda: case.run(WHOLE.run))
    if not works:
        return
    what, refused, half = f"{case.name}{setting.words}", len(s.refused), len(case.parts) // 2
    words = f"{what} is not what eager mode gives"
    torch.compiler.reset()
    _, error = tried(lambda: check_equal(s, words, case.run(setting.operand()), expected))
    torch.compiler.reset()
    if error is not None:
        for parts in (case.parts[:half], case.parts[half:]) if half else ():
            by_compiler(s, group(s, parts), setting)
        if len(s.refused) == refused and not s.refuses(what, error, deliberate=False):
            raise Broken(problem(what, error)) from error


# ---- values ------------------------------------------------------------------------------------------------


def together(cases: Sequence[Case]) -> Callable[[Any], list[Any]]:
    """A function that runs some calls on a value."""
    runs = [case.run for case in cases]

    def run(x: Any) -> list[Any]:
        results = []  # not a comprehension: from Python 3.12 on it has a handler, and Dynamo drops the cause
        for run in runs:
            results.append(run(x))
        return results

    return run


def group(s: Subject, cases: Sequence[Case]) -> Case:
    """The group of some calls."""
    name = cases[0].name if len(cases) == 1 else "all ops at once"
    run = torch.no_grad()(lambda compile: compile(together(cases))(s.make()))
    return Case(name, run, parts=tuple(cases))


def groups(s: Subject, most: int | None = None) -> list[Case]:
    """The calls that are not views, all together; an op that writes to the value gets one of its own."""
    cases = [c for c in accepted(s) if c.name not in VIEWS and not is_view_of_plain(s, c)] or [CLONE]
    writing = [c for c in cases if c.name.partition(".")[0].endswith("_")]
    rest = [c for c in cases if c not in writing]
    return [group(s, cases) for cases in (rest[:most], *([c] for c in writing)) if cases]


# ---- mutation and views ------------------------------------------------------------------------------------


def mutations(s: Subject) -> list[Case]:
    """A function that writes to its argument."""
    double = lambda x: (x.mul_(2), x + x)[1]  # noqa: E731
    run = torch.no_grad()(lambda compile: [x := s.make(), compile(double)(x)])
    return [Case("x.mul_(2); x + x", run)]


def _returned_views(s: Subject, make: Callable[[Case, Compile], Any], words: str, *names: str) -> list[Case]:
    """Some views that a compiled function returns, and that are written to afterwards."""

    @torch.no_grad()
    def run(view: Case, compile: Compile) -> Any:
        x = make(view, compile)
        out = compile(view.run)(x)
        if isinstance(out, s.cls):
            s.works("a write to a view", lambda: out.mul_(2))
        return [x, out]

    views = applicable(s, {name: VIEWS[name] for name in names})
    return [Case(f"{view.name}{words}", partial(run, view)) for view in views]


def written_views(s: Subject) -> list[Case]:
    """Views of a value."""
    names = ("x.view(x.shape)", "x[1:]", "x.transpose(0, -1)", "x.unsqueeze(0)")
    return _returned_views(s, lambda view, compile: s.make(), ".mul_(2)", *names)


def offset_views(s: Subject) -> list[Case]:
    """Views of a value whose inner tensors start at different places in their storages."""

    def make(view: Case, compile: Compile) -> Any:
        x = s.make().detach()
        s.builder(x)
        value, error = tried(
            s.construct, x, {n: _moved(t, i) for i, (n, t) in enumerate(s.inners(x).items())}
        )
        if error is not None:
            raise NotImplementedError("inner tensors with offsets")
        if not succeeds(_check_remake, compile, view):
            raise NotImplementedError("views are remade at a wrong offset on this release of PyTorch")
        return value

    return _returned_views(s, make, " with offsets", "x.view(x.shape)", "x[1:]")


def _check_remake(compile: Compile, case: Case) -> None:
    """Raises unless a compiler is right for a wrapper of one tensor; torch.compile of 2.15 counts an offset twice."""
    view = torch.arange(40.0)[5:29].view(4, 6)
    torch.compiler.reset()
    torch.testing.assert_close(compile(case.run)(Nest(view)).inside, case.run(view))


def _moved(t: Any, index: int) -> Any:
    """The same numbers, further back in a storage that has room behind them."""
    if type(t) is not Tensor:
        return t
    room = t.new_zeros(3 * t.numel() + 2 * index + 2)
    return room[2 * index + 1 :][: t.numel()].view(t.shape).copy_(t)


# ---- gradients, construction, modules ----------------------------------------------------------------------


def tangents(s: Subject) -> list[Case]:
    """The gradient of some ops, for each kind of tangents.

    Raises:
        Skipped: there is none in eager mode.
    """
    cases = differentiable(s)[:6]
    skip_unless(cases, "no differentiable op is known to work in eager mode")

    def run(kind: str, compile: Compile) -> Any:
        x = s.trainable()
        results = live(compile(together(cases))(x))
        used = results[:1] if kind == "missing" else results
        given = [
            torch.ones_like(t.detach()) if isinstance(t, s.cls) and kind != "plain" else plain
            for t, plain in zip(used, ones_for(used), strict=True)
        ]
        grads = torch.autograd.grad(used, x, given, allow_unused=True)
        # A plain gradient and a gradient of the class are the same if the class can convert the plain one.
        has_inners = s.declared and any(map(is_differentiable, s.inners(x).values()))
        if has_inners and s.cls._traits.is_representation and x.materialize().requires_grad:
            grads = [x.detach().wrap_cotangent(g) if type(g) is Tensor else g for g in grads]
        # The inner tensors alone: a class may mark a gradient as a cotangent in its metadata.
        return [list(s.inners(g).values()) if isinstance(g, s.cls) else g for g in grads]

    kinds = ("plain", "of the class", "missing")
    return [Case(f"the gradient with tangents {kind}", partial(run, kind)) for kind in kinds]


def construction(s: Subject) -> list[Case]:
    """A value that is made, and decomposed, in a compiled function."""
    x = s.make()
    skip_unless(
        s.declared or s.options.get("construct"),
        f"pass construct=, which makes {one_of(s.cls)} from {', '.join(s.inners(x))}",
    )
    build, names = s.builder(x)
    parts = [t for n, t in s.inners(x).items() if n in names]

    def make(*parts: Any) -> Any:
        value = build(*parts)
        return value.clone(), [getattr(value, name) * 2 for name in names]

    return [Case("construction", lambda compile: compile(make)(*parts))]


def modules(s: Subject, *, plain: bool = False) -> list[Case]:
    """A module with a parameter of the class and an op on it; with ``plain``, an op that gives a plain tensor."""
    cases = [c for c in accepted(s) if not plain or type(c.run(s.make())) is Tensor]
    if not cases:
        lacks = "gives a plain tensor, and torch.export takes no other results"
        raise Skipped(f"no op {lacks if plain else 'is known to work in eager mode'}")
    module = Holder(s.make().detach(), cases[0].run)
    run = torch.no_grad()(lambda compile: compile(module)(torch.ones(2)))
    return [Case(f"a module with {cases[0].name}", run)]


def nests(s: Subject) -> list[Case]:
    """A copy of a wrapper around a value, and of a value around wrappers."""
    inside, _ = tried(with_nests, s)
    return [
        Case(f"x.clone() with {type(x).__name__} outside", lambda compile, x=x: compile(CLONE.run)(x))
        for x in (Nest(s.make()), inside)
        if x is not None
    ]


# ---- other values, other sizes -----------------------------------------------------------------------------


def other_sizes(s: Subject) -> list[Case]:
    """Values of several sizes in turn, where the third and later ones make no new program.

    Raises:
        Skipped: there are no values of other sizes.
    """
    factories = [s.factory, *derive.sizes(s)]
    skip_unless(len(factories) >= 3, "pass sizes=[...], at least two factories of values of other sizes")
    # A class may specialize on sizes. One program is required only where the author passes ``sizes=``.
    by_factory = [[t.shape for t in (x, *s.inners(x).values())] for x in map(s.make, factories)]
    by_tensor = zip(*by_factory, strict=False)
    asks = s.options.get("sizes") and all(
        _vary_alike(first, second, other) for first, second, *others in by_tensor for other in others
    )
    return _in_turn(s, "values of several sizes", factories, 2 if asks else len(factories))


def _vary_alike(first: torch.Size, second: torch.Size, other: torch.Size) -> bool:
    """Whether a size differs from the first one in no other dims than the second, at which a program became dynamic."""
    return len(first) == len(second) == len(other) and all(
        m != n or m == k for m, n, k in zip(first, second, other, strict=True)
    )


def other_metadata(s: Subject) -> list[Case]:
    """Values of several kinds of metadata in turn, and the first one again."""
    factories = [s.factory, *derive.variants(s), s.factory]
    return _in_turn(s, "values with other metadata", factories, len(factories))


def _in_turn(s: Subject, name: str, factories: Sequence[Factory], compiles: int) -> list[Case]:
    """Calls of one compiled function; only the first ``compiles`` of them may compile a program."""
    with torch.no_grad():
        cases = [c for c in accepted(s) if succeeds(lambda c=c: [c.run(s.make(f)) for f in factories])][:8]

    @torch.no_grad()
    def run(compile: Compile) -> Any:
        function, results = compile(together(cases)), []
        for number, factory in enumerate(factories):
            with torch.compiler.set_stance("default" if number < compiles else "fail_on_recompile"):
                results.append(function(s.make(factory)))
        return results

    return [Case(name, run)]
