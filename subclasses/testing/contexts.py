"""Contexts: where a case runs. A context makes settings, each with an operand, a mode and words for a report.

An oracle runs a case in a setting, and compares its observation with an observation of the usual call.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subclasses._torch import is_traceable_wrapper_subclass
from subclasses.base import TensorSubclass
from subclasses.spec.fields import inner
from subclasses.spec.values import map_tensors
from subclasses.testing import derive
from subclasses.testing.calls import WHOLE, operands
from subclasses.testing.cases import stand_ins
from subclasses.testing.errors import Skipped, skip_unless, tried
from subclasses.testing.subject import Compile, Factory, Subject


@dataclass(frozen=True)
class Setting:
    """Where a case runs.

    Attributes:
        operand: makes the value, or the pair of values, that the case gets. A program gets a compiler.
        words: added to the call in a report.
        mode: the mode in which it runs, within ``no_grad``.
        read: returns the part of the results that is compared.
        usual: makes the operand of the usual call. By default, that is a value of the factory. Where an oracle compares
            with the reference, it makes plain tensors, by default the tensors that the operand represents.
    """

    operand: Callable[[], Any]
    words: str = ""
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext
    read: Callable[[Any], Any] = lambda results: results
    usual: Callable[[], Any] | None = None


Context = Callable[[Subject], list[Setting]]

# ---- operands ----------------------------------------------------------------------------------------------


class Nest(TensorSubclass, fallback="map"):
    """A hostile wrapper: it has no data of its own, and runs each op on its inner tensor."""

    inside: Tensor = inner()


def unnested(value: Any, opens: bool = False) -> Any:
    """The same results with the inner tensor of every nest in its place; with ``opens``, values as type and parts."""
    if isinstance(value, Nest):
        return unnested(value.inside, opens)
    if opens and is_traceable_wrapper_subclass(value):
        value = [type(value).__name__, *(getattr(value, n) for n in value.__tensor_flatten__()[0])]
    return [unnested(part, opens) for part in value] if isinstance(value, list | tuple) else value


def with_nests(s: Subject) -> Any:
    """A value whose plain inner tensors are wrappers, also within declared inner values."""
    x = s.make().detach()
    inners = s.changed(x, lambda path, t: t if path.endswith("_carrier") else Nest(t))
    works, value = s.works("inner tensors that are wrappers", lambda: s.construct(x, inners))
    skip_unless(works, "the class refuses inner tensors that are wrappers")
    return value


def _lazily(path: str, t: Tensor) -> Tensor:
    """A tensor with its conjugate or negative bit set, as far as its dtype has one."""
    return torch.complex(t, t).conj().imag if t.dtype in (torch.float32, torch.float64) else t.conj()


def _lazy(s: Subject) -> list[Setting]:
    """A value whose inner tensors have lazy bits; a class that refuses them does so once."""
    make = lambda: s.construct(x := s.make(), s.changed(x, _lazily))  # noqa: E731
    make()
    return [Setting(make, " on inner tensors with a lazy bit set")]


def values_of(s: Subject, *pair: Factory) -> list[Any]:
    """The values of two factories."""
    return [s.make(factory).detach() for factory in pair]


def two(s: Subject) -> list[Any]:
    """A value of the factory, and the second value."""
    return values_of(s, s.factory, derive.second(s))


# ---- the table ---------------------------------------------------------------------------------------------


def _in_threads(run: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(values)) as pool:
        return [*pool.map(torch.no_grad()(run), values)]


CONTEXTS: dict[str, Context] = {
    "eager": lambda s: [Setting(s.make)],
    "detached": lambda s: [Setting(lambda: s.make().detach(), usual=partial(stand_ins, s))],
    "materialized": lambda s: [
        Setting(
            s.make,
            ", read by materialize(),",
            read=lambda got: map_tensors(got, lambda t: t.materialize() if isinstance(t, s.cls) else t),
            usual=lambda: [s.make().materialize().clone()],
        )
    ],
    "autocast": lambda s: [
        Setting(s.make, " under autocast", lambda: torch.autocast(s.make().device.type, torch.bfloat16))
    ],
    "grad": lambda s: [Setting(s.trainable, mode=torch.enable_grad)],
    "inference": lambda s: [
        Setting(partial(WHOLE.run, s.make()), " of a value from outside", torch.inference_mode),
        Setting(s.make, mode=torch.inference_mode),
    ],
    "parameters": lambda s: [
        Setting(
            s.make,
            " with Parameters for plain operands",
            lambda: operands(partial(nn.Parameter, requires_grad=False)),
        )
    ],
    "given metadata": lambda s: [
        Setting(partial(s.make, make)) for make in (s.factory, *s.options.get("variants", ()))
    ],
    "other metadata": lambda s: [
        Setting(partial(s.make, make), f" {words}") for words, make in derive.named_variants(s)
    ],
    "lazy bits": _lazy,
    "nested inside": lambda s: [
        Setting(
            partial(with_nests, s),
            " on a value whose inner tensors are wrappers",
            read=partial(unnested, opens=True),
        )
    ],
    "nested outside": lambda s: [
        Setting(lambda: Nest(s.make()), " on a wrapper around a value", read=unnested)
    ],
    "two values": lambda s: [Setting(partial(two, s))],
    "other integers": lambda s: [
        Setting(partial(values_of, s, s.factory, other), ", where y holds other integers")
        for other in filter(None, [derive.other_integers(s)])
    ],
    "mixed metadata": lambda s: [
        Setting(partial(values_of, s, *pair), f", {name} {words}")
        for words, make in derive.named_variants(s)
        for pair, name in (((s.factory, make), "y"), ((make, s.factory), "x"))
    ],
    "threads": lambda s: [Setting(lambda: _in_threads, " beside other threads", usual=lambda: map)],
}

# ---- compilers ---------------------------------------------------------------------------------------------


def named(target: str, **options: Any) -> Compile:
    """A compiler by its import path, looked up when it is used: one that is not installed is left out.

    Args:
        target: ``"package:function"``; the function takes the function to compile.
        **options: passed on to it; a ``backend`` of ``torch.compile`` must be registered.
    """

    def compile(fn: Callable[..., Any]) -> Callable[..., Any]:
        package, backend = target.partition(":")[0], options.get("backend")
        skip_unless(importlib.util.find_spec(package) is not None, f"{package} is not installed")
        is_known = package != "torch" or backend in torch.compiler.list_backends(exclude_tags=())
        skip_unless(is_known, f"torch.compile has no backend {backend}")
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


def under(paths: Mapping[str, Compile] | None = None, *, briefly: bool = False) -> Context:
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
            Setting(partial(_reset, compile), f" under {name}", usual=lambda: WHOLE.run)
            for name, compile in [*chosen.items()][:first]
            if paths is EXPORT or not isinstance(tried(compile, lambda: None)[1], Skipped)
        ]

    return context


def _reset(compile: Compile) -> Compile:
    """A compiler without programs of earlier calls."""
    torch.compiler.reset()
    return compile
