"""Programs: calls that are compiled. Each gives the result of eager mode under every compiler, or is refused.

A case here is a function of a compiler, itself a function from a function to a compiled one. Given the identity, the
case runs in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subclasses.testing import derive
from subclasses.testing.calls import CLONE, VIEWS, WHOLE, Case
from subclasses.testing.cases import (
    accepted,
    applicable,
    few_of_each_rule,
    gradients_by,
    live,
    ones_for,
    recorded,
)
from subclasses.testing.contexts import Nest, Setting, under, with_nests
from subclasses.testing.errors import Broken, problem, skip_unless, succeeds, tried
from subclasses.testing.oracles import by_eager
from subclasses.testing.structure import Holder, is_view_of_plain
from subclasses.testing.subject import Compile, Factory, Subject


def by_compiler(s: Subject, case: Case, setting: Setting) -> None:
    """Compares with eager mode; of a group of calls that fails, each half is compared."""
    what, refused, half = f"{case.name}{setting.words}", len(s.refused), len(case.parts) // 2
    _, error = tried(by_eager, s, case, setting, "eager mode")
    for parts in (case.parts[:half], case.parts[half:]) if error is not None and half else ():
        by_compiler(s, group(s, parts), setting)
    if error is not None and len(s.refused) == refused and not s.refuses(what, error, deliberate=False):
        raise Broken(problem(what, error)) from error


def program(
    s: Subject,
    name: str,
    function: Callable[..., Any],
    *makes: Callable[[], Any],
    compiles: int = 1,
    writes: bool = False,
) -> Case:
    """A case that compiles a function, calls it on operands in turn, and gives the operands and the results.

    Args:
        s: the class.
        name: the name of the case.
        function: the function to compile.
        makes: make the operands.
        compiles: the number of calls, the first ones, that may compile a program.
        writes: write to each result afterwards, which may be a view of its operand.
    """

    @torch.no_grad()
    def run(compile: Compile) -> dict[str, Any]:
        compiled, observed = compile(function), dict[str, Any]()
        for number, make in enumerate(makes):
            with torch.compiler.set_stance("default" if number < compiles else "fail_on_recompile"):
                x = make()
                out = compiled(x)
            call = f"call {number + 1}" if len(makes) > 1 else ""
            observed |= {call: out, f"x after {call or 'it'}": x}
            if writes and isinstance(out, s.cls):
                s.works("a write to a view", lambda out=out: out.mul_(2))
        return observed

    return Case(name, run)


# ---- values, writes and views --------------------------------------------------------------------------------


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
    return replace(program(s, name, together(cases), s.make), parts=tuple(cases))


def groups(s: Subject, most: int | None = None) -> list[Case]:
    """The calls that are not views, all together; an op that writes to the value gets one of its own."""
    cases = [c for c in few_of_each_rule(s) if c.name not in VIEWS and not is_view_of_plain(s, c)] or [CLONE]
    writing = [c for c in cases if c.name.partition(".")[0].endswith("_")]
    rest = [c for c in cases if c not in writing]
    return [group(s, cases) for cases in (rest[:most], *([c] for c in writing)) if cases]


def written_views(s: Subject, make: Callable[[], Any], words: str, *names: str) -> list[Case]:
    """Some views that a compiled function returns, and that are written to afterwards."""
    cases = applicable(s, {name: VIEWS[name] for name in names})
    return [program(s, f"{view.name}{words}", view.run, make, writes=True) for view in cases]


RETURNED = ("x.view(x.shape)", "x[1:]", "x.transpose(0, -1)", "x.unsqueeze(0)")
OFFSETS = ("x.view(x.shape)", "x[1:]")


def offset_views(s: Subject) -> list[Case]:
    """Views of a value whose inner tensors start at different places in their storages."""
    x = s.make().detach()
    s.builder(x)

    def make() -> Any:
        return s.construct(x, {name: _moved(t, i) for i, (name, t) in enumerate(s.inners(x).items())})

    skip_unless(succeeds(make), "the class takes no inner tensors with offsets")
    return written_views(s, make, " with offsets", *OFFSETS)


def _moved(t: Any, index: int) -> Any:
    """The same numbers, further back in a storage that has room behind them."""
    if type(t) is not Tensor:
        return t
    room = t.new_zeros(3 * t.numel() + 2 * index + 2)
    return room[2 * index + 1 :][: t.numel()].view(t.shape).copy_(t)


def with_offsets(s: Subject) -> list[Setting]:
    """The compilers that are right for a wrapper of one tensor; torch.compile of 2.15 counts an offset twice."""
    views = together([Case(name, VIEWS[name]) for name in OFFSETS])
    nest = program(s, "", views, lambda: Nest(torch.arange(40.0)[5:29].view(4, 6)))
    return [setting for setting in under()(s) if succeeds(by_eager, s, nest, setting)]


# ---- gradients, construction, modules ----------------------------------------------------------------------


def tangents(s: Subject) -> list[Case]:
    """The gradient of some ops, for each kind of tangents.

    Raises:
        Skipped: there is none in eager mode.
    """
    cases = [c for c in recorded(s) if succeeds(lambda c=c: gradients_by([x := s.trainable()], c.run(x)))][:6]
    skip_unless(cases, "no differentiable op is known to work in eager mode")

    @torch.enable_grad()
    def run(kind: str, compile: Compile) -> Any:
        x = s.trainable()
        results = live(compile(together(cases))(x))[: 1 if kind == "missing" else None]
        given = [
            torch.ones_like(t.detach()) if isinstance(t, s.cls) and kind != "plain" else plain
            for t, plain in zip(results, ones_for(results), strict=True)
        ]
        grads = torch.autograd.grad(results, x, given, allow_unused=True)
        # A plain gradient and a gradient of the class are the same if the class can convert the plain one.
        if s.declared and s.cls._traits.is_representation and s.floats(x) and x.materialize().requires_grad:
            grads = [x.detach().wrap_cotangent(g) if type(g) is Tensor else g for g in grads]
        # The inner tensors alone: a class may mark a gradient as a cotangent in its metadata.
        return [list(s.inners(g).values()) if isinstance(g, s.cls) else g for g in grads]

    return [
        Case(f"the gradient with tangents {kind}", partial(run, kind))
        for kind in ("plain", "of the class", "missing")
    ]


def construction(s: Subject) -> list[Case]:
    """A value that is made, and decomposed, in a compiled function."""
    x = s.make()
    build, names = s.builder(x)
    parts = [t for n, t in s.inners(x).items() if n in names]

    def make(parts: Any) -> Any:
        value = build(*parts)
        return value.clone(), [getattr(value, name) * 2 for name in names]

    return [program(s, "construction", make, lambda: parts)]


def modules(s: Subject, *, plain: bool = False) -> list[Case]:
    """A module with a parameter of the class and an op on it; with ``plain``, an op that gives a plain tensor."""
    cases = [c for c in accepted(s) if not plain or type(c.run(s.make())) is Tensor]
    lacks = "gives a plain tensor, and torch.export takes no other results"
    skip_unless(cases, f"no op {lacks if plain else 'is known to work in eager mode'}")
    return [
        program(
            s,
            f"a module with {cases[0].name}",
            Holder(s.make().detach(), cases[0].run),
            lambda: torch.ones(2),
        )
    ]


def nests(s: Subject) -> list[Case]:
    """A copy of a wrapper around a value, and of a value around wrappers."""
    inside, _ = tried(with_nests, s)
    return [
        program(s, f"x.clone() with {type(x).__name__} outside", CLONE.run, partial(WHOLE.run, x))
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
    return in_turn(s, "values of several sizes", factories[1:], 2 if asks else None)


def _vary_alike(first: torch.Size, second: torch.Size, other: torch.Size) -> bool:
    """Whether a size differs from the first one in no other dims than the second, at which a program became dynamic."""
    return len(first) == len(second) == len(other) and all(
        m != n or m == k for m, n, k in zip(first, second, other, strict=True)
    )


@torch.no_grad()
def in_turn(s: Subject, name: str, others: Sequence[Factory], compiles: int | None = None) -> list[Case]:
    """Some calls on a value and on values of other factories; the first ``compiles`` may compile a program."""
    makes = [s.factory, *others]
    cases = [c for c in accepted(s) if succeeds(lambda c=c: [c.run(s.make(make)) for make in makes])][:8]
    operands = [partial(s.make, make) for make in makes]
    return [program(s, name, together(cases), *operands, compiles=compiles or len(makes))]
