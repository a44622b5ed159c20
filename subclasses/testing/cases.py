"""The calls that the kit tries on any value: one of each kind, and those that the author adds.

A case is a function of one argument, run on a value and on the tensors that the value stands for. It may read
sizes and dtype. It makes its other arguments itself, the same ones at each call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses.testing.errors import Attempt, refusal, succeeds
from subclasses.testing.property import Case
from subclasses.testing.reach import author_cases, calls_of, missed_rules, vector_calls
from subclasses.testing.subject import Subject

Found = TypeVar("Found")

# Lists that get the plain operands which cases make, where their gradients are asked for. Dynamo traces the reading.
_COLLECTORS: list[list[Tensor]] = []


def like(x: Tensor, *shape: int) -> Tensor:
    """A plain tensor of the dtype and device of ``x``, filled with small distinct numbers."""
    size = shape or tuple(x.shape)
    count = 1
    for extent in size:
        count = count * extent
    numbers = (torch.arange(count, device=x.device) % 7 - 3).reshape(size)
    plain = (numbers / 4 if x.dtype.is_floating_point else numbers).to(x.dtype)
    if _COLLECTORS and plain.is_floating_point():
        _COLLECTORS[-1].append(plain.requires_grad_())
    return plain


@contextmanager
def operands_with_gradients() -> Iterator[list[Tensor]]:
    """Collects the plain operands that cases make in a block, which require grad."""
    _COLLECTORS.append([])
    try:
        yield _COLLECTORS[-1]
    finally:
        _COLLECTORS.pop()


def _rows(x: Tensor) -> Tensor:
    """Indices of rows: of the last one and of the first one, each twice."""
    return torch.arange(x.shape[0], device=x.device).roll(1)[:2].repeat(2)


def once(find: Callable[[Subject], Found]) -> Callable[[Subject], Found]:
    """Finds something, such as cases, at the first call for a class, and caches it with the class."""

    @functools.wraps(find)
    def found(s: Subject) -> Found:
        if find.__name__ not in s.cache:
            s.cache[find.__name__] = find(s)
        return s.cache[find.__name__]

    return found


# ---- results -------------------------------------------------------------------------------------------------

FUNCTIONAL: dict[str, Callable[[Any], Any]] = {
    "x * 2": lambda x: x * 2,
    "x + x": lambda x: x + x,
    "x - plain": lambda x: x - like(x),
    "plain * x": lambda x: like(x) * x,
    "x * x[:1]": lambda x: x * x[:1],
    "1 - x": lambda x: 1 - x,
    "x / 2": lambda x: x / 2,
    "-x": lambda x: -x,
    "x.abs()": lambda x: x.abs(),
    "x.exp()": lambda x: x.exp(),
    "x.sigmoid()": lambda x: x.sigmoid(),
    "F.relu(x)": lambda x: F.relu(x),
    "F.gelu(x)": lambda x: F.gelu(x),
    "x.clamp(-1, 1)": lambda x: x.clamp(-1, 1),
    "torch.where": lambda x: torch.where(like(x).real > 0, x, x * 2),
    "x == x": lambda x: x == x,
    "x > 0": lambda x: x > 0,
    "x.sum()": lambda x: x.sum(),
    "x.sum(-1)": lambda x: x.sum(-1),
    "x.mean(0)": lambda x: x.mean(0),
    "x.amax(-1)": lambda x: x.amax(-1),
    "x.var(-1)": lambda x: x.var(-1),
    "x.norm()": lambda x: x.norm(),
    "x.softmax(-1)": lambda x: x.softmax(-1),
    "x.log_softmax(-1)": lambda x: x.log_softmax(-1),
    "x.cumsum(-1)": lambda x: x.cumsum(-1),
    "x.sort(-1)": lambda x: x.sort(-1).values,
    "x.argmax(-1)": lambda x: x.argmax(-1),
    "x @ x.mT": lambda x: x @ x.mT,
    "plain @ x": lambda x: like(x, 3, x.shape[-2]) @ x,
    "F.linear(plain, x)": lambda x: F.linear(like(x, 3, x.shape[1]), x),
    "F.linear(plain, x, bias)": lambda x: F.linear(like(x, 3, x.shape[1]), x, like(x, x.shape[0])),
    "F.linear(x, plain, bias)": lambda x: F.linear(x, like(x, 3, x.shape[-1]), like(x, 3)),
    "F.layer_norm(x)": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "F.embedding(i, x)": lambda x: F.embedding(_rows(x), x),
    "F.embedding(i, x, padding_idx=0)": lambda x: F.embedding(_rows(x), x, 0),
    "nn.Embedding": lambda x: F.embedding(_rows(x), x, None, None, 2.0, False, False),
    "torch.cat([x, x])": lambda x: torch.cat([x, x]),
    "torch.stack([x, x])": lambda x: torch.stack([x, x]),
    "x.flip(0)": lambda x: x.flip(0),
    "x.masked_fill": lambda x: x.masked_fill(torch.arange(x.shape[-1], device=x.device) % 2 == 0, 0),
    "x.index_select": lambda x: x.index_select(0, _rows(x)),
    "x.repeat(2, 1)": lambda x: x.repeat(2, 1),
    "x * x": lambda x: x * x,
    "x * plain": lambda x: x * like(x),
    "x + 3": lambda x: x + 3,
    "x.sum(-1, keepdim=True)": lambda x: x.sum(-1, keepdim=True),
    "x.clone()": lambda x: x.clone(),
    "x.contiguous()": lambda x: x.contiguous(),
    "torch.zeros_like(x)": lambda x: torch.zeros_like(x),
    "torch.ones_like(x)": lambda x: torch.ones_like(x),
    "torch.full_like(x, 2)": lambda x: torch.full_like(x, 2),
    "x.new_zeros(2)": lambda x: x.new_zeros(2),
}


def _converted(x: Any, y: Any) -> list[Any]:
    """The dtype of a result, and its numbers in that of ``x``: a class may round before it converts, or after."""
    return [y.dtype, y.to(x.dtype)]


# Arguments that are not the default, or of another sign, order or row than in other cases, which a rule may drop.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "x * -2": lambda x: x * -2,
    "plain - x": lambda x: like(x) - x,
    "x[-1]": lambda x: x[-1],
    "torch.add(x, x, alpha=2)": lambda x: torch.add(x, x, alpha=2),
    "torch.add(x, plain, alpha=2)": lambda x: torch.add(x, like(x), alpha=2),
    "torch.add(plain, x, alpha=2)": lambda x: torch.add(like(x), x, alpha=2),
    "torch.add(x, 1, alpha=2)": lambda x: torch.add(x, 1, alpha=2),
    "torch.sub(x, x, alpha=2)": lambda x: torch.sub(x, x, alpha=2),
    "torch.sub(x, plain, alpha=2)": lambda x: torch.sub(x, like(x), alpha=2),
    "torch.sub(plain, x, alpha=2)": lambda x: torch.sub(like(x), x, alpha=2),
    "torch.rsub(x, 1, alpha=2)": lambda x: torch.rsub(x, 1, alpha=2),
    'torch.div(x, 0.3, rounding_mode="floor")': lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    'torch.div(x, 0.3, rounding_mode="trunc")': lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    'torch.div(x, plain, rounding_mode="floor")': lambda x: torch.div(x, like(x) + 2, rounding_mode="floor"),
    "torch.cat([x, x], -1)": lambda x: torch.cat([x, x], -1),
    "torch.stack([x, x], -1)": lambda x: torch.stack([x, x], -1),
    "x.index_select(-1, i)": lambda x: x.index_select(-1, _rows(x)),
    "x.roll(1, -1)": lambda x: x.roll(1, -1),
    "x.cumsum(-2)": lambda x: x.cumsum(-2),
    "x.softmax(-2)": lambda x: x.softmax(-2),
    "x.sum(-2)": lambda x: x.sum(-2),
    "x.mean((-2, -1))": lambda x: x.mean((-2, -1)),
    "x.amax(-2)": lambda x: x.amax(-2),
    "aten.split(x, 2, -1)": lambda x: torch.ops.aten.split.Tensor(x, 2, -1),
    "torch.chunk(x, 2, -1)": lambda x: list(torch.chunk(x, 2, -1)),
    "x.repeat_interleave(2, -1)": lambda x: x.repeat_interleave(2, -1),
    "x.double() * 2": lambda x: _converted(x, x.double() * 2),
    "x.softmax(0)": lambda x: x.softmax(0),
    "x.flip(-1)": lambda x: x.flip(-1),
    "x.tril(1)": lambda x: x.tril(1),
    "x.index_select(1, i)": lambda x: x.index_select(1, _rows(x)),
    "x.masked_fill(mask, 3)": lambda x: x.masked_fill(torch.arange(x.shape[-1], device=x.device) % 2 == 0, 3),
    "x.prod(-1, dtype=torch.float64)": lambda x: _converted(x, x.prod(-1, dtype=torch.float64)),
    "F.leaky_relu(x, 0.5)": lambda x: F.leaky_relu(x, 0.5),
    "x.clamp(min=0)": lambda x: x.clamp(min=0),
    "x.clamp(max=0)": lambda x: x.clamp(max=0),
    'F.gelu(x, approximate="tanh")': lambda x: F.gelu(x, approximate="tanh"),
    "x.sum(0, keepdim=True)": lambda x: x.sum(0, keepdim=True),
    "x.sum(dim=(), keepdim=True)": lambda x: x.sum(dim=(), keepdim=True),
    "x.sum(dtype=torch.float64)": lambda x: _converted(x, x.sum(dtype=torch.float64)),
    "x.sum(-1, dtype=torch.float64)": lambda x: _converted(x, x.sum(-1, dtype=torch.float64)),
    "x.mean(-1, keepdim=True)": lambda x: x.mean(-1, keepdim=True),
    "x.mean(dtype=torch.float64)": lambda x: _converted(x, x.mean(dtype=torch.float64)),
    "x.mean(-1, dtype=torch.float64)": lambda x: _converted(x, x.mean(-1, dtype=torch.float64)),
    "x.amax(-1, keepdim=True)": lambda x: x.amax(-1, keepdim=True),
    "x.amin(0, keepdim=True)": lambda x: x.amin(0, keepdim=True),
    "x.max(-1, keepdim=True)": lambda x: [*x.max(-1, keepdim=True)],
    "x.var(-1, correction=0)": lambda x: x.var(-1, correction=0),
    "x.var(-1, keepdim=True)": lambda x: x.var(-1, keepdim=True),
    "x.std(-1, correction=0)": lambda x: x.std(-1, correction=0),
    "x.norm(1, -1, keepdim=True)": lambda x: x.norm(1, -1, keepdim=True),
    "x.logsumexp(-1, keepdim=True)": lambda x: x.logsumexp(-1, keepdim=True),
    "x.prod(-1, keepdim=True)": lambda x: x.prod(-1, keepdim=True),
    "x.any(-1, keepdim=True)": lambda x: x.any(-1, keepdim=True),
    "x.all(-1, keepdim=True)": lambda x: x.all(-1, keepdim=True),
    "x.argmax(-1, keepdim=True)": lambda x: x.argmax(-1, keepdim=True),
    "x.softmax(-1, dtype=torch.float64)": lambda x: _converted(x, x.softmax(-1, dtype=torch.float64)),
    "x.log_softmax(-1, dtype=torch.float64)": lambda x: _converted(x, x.log_softmax(-1, dtype=torch.float64)),
    "x.cumsum(-1, dtype=torch.float64)": lambda x: _converted(x, x.cumsum(-1, dtype=torch.float64)),
    "x.sort(-1, descending=True)": lambda x: x.sort(-1, descending=True).values,
    "x.round(decimals=1)": lambda x: x.round(decimals=1),
    "torch.nan_to_num(x / 0, nan=3)": lambda x: torch.nan_to_num((x - x) / 0, nan=3.0),
    "torch.addmm(plain, plain, x, beta=2, alpha=3)": lambda x: torch.addmm(
        like(x, 3, x.shape[1]), like(x, 3, x.shape[0]), x, beta=2, alpha=3
    ),
    "torch.addcmul(x, x, plain, value=2)": lambda x: torch.addcmul(x, x, like(x), value=2),
    "torch.zeros_like(x, dtype=torch.float64)": lambda x: _converted(
        x, torch.zeros_like(x, dtype=torch.float64)
    ),
    "x.clone().add_(plain, alpha=2)": lambda x: x.clone().add_(like(x), alpha=2),
    "x.clone().sub_(plain, alpha=2)": lambda x: x.clone().sub_(like(x), alpha=2),
    'x.clone().div_(0.3, rounding_mode="floor")': lambda x: x.clone().div_(0.3, rounding_mode="floor"),
}

CLONE = Case("x.clone()", FUNCTIONAL["x.clone()"])

# ---- views -------------------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "x.detach()": lambda x: x.detach(),
    "x.view(-1)": lambda x: x.view(-1),
    "x.view(x.shape)": lambda x: x.view(x.shape),
    "x.transpose(0, -1)": lambda x: x.transpose(0, -1),
    "x.t()": lambda x: x.t(),
    "x[:1]": lambda x: x[:1],
    "x[0]": lambda x: x[0],
    "x[1:]": lambda x: x[1:],
    "x[::2]": lambda x: x[::2],
    "x[..., ::2]": lambda x: x[..., ::2],
    "x[..., 1:]": lambda x: x[..., 1:],
    "x[:, 0]": lambda x: x[:, 0],
    "x.select(-1, 0)": lambda x: x.select(-1, 0),
    "x[:, 1:]": lambda x: x[:, 1:],
    "x.narrow(-1, 0, 1)": lambda x: x.narrow(-1, 0, 1),
    "x.transpose(-2, -1)": lambda x: x.transpose(-2, -1),
    "x.unsqueeze(0)": lambda x: x.unsqueeze(0),
    "x.unsqueeze(1)": lambda x: x.unsqueeze(1),
    "x.unsqueeze(-1)": lambda x: x.unsqueeze(-1),
    "x.unflatten(-1, (1, -1))": lambda x: x.unflatten(-1, (1, -1)),
    "x.movedim(-1, 0)": lambda x: x.movedim(-1, 0),
    "x.expand": lambda x: x.expand(2, *x.shape),
    "x.split(1)": lambda x: x.split(1)[0],
    "x.unbind()": lambda x: x.unbind()[0],
    "x.unbind(-1)": lambda x: x.unbind(-1)[-1],
    "x.flatten()": lambda x: x.flatten(),
    "x.as_strided": lambda x: x.as_strided(x.shape, x.stride()),
}

# ---- mutations ----------------------------------------------------------------------------------------------

MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "x.add_(1)": lambda x: x.add_(1),
    "x.mul_(2)": lambda x: x.mul_(2),
    "x.mul_(plain)": lambda x: x.mul_(like(x)),
    "x.zero_()": lambda x: x.zero_(),
    "x.fill_(2)": lambda x: x.fill_(2),
    "x.copy_(plain)": lambda x: x.copy_(like(x)),
    "x.copy_(x * 2)": lambda x: x.copy_(x * 2),
    "torch.mul(x, 2, out=x)": lambda x: torch.mul(x, 2, out=x),
}

VIEW_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "x[:1].add_(1)": lambda x: x[:1].add_(1),
    "x.view(-1).mul_(2)": lambda x: x.view(-1).mul_(2),
    "x.view(-1)[1:].zero_()": lambda x: x.view(-1)[1:].zero_(),
    "x.transpose(0, -1).add_(1)": lambda x: x.transpose(0, -1).add_(1),
}

METADATA_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "x.t_()": lambda x: x.t_(),
    "x.unsqueeze_(0)": lambda x: x.unsqueeze_(0),
    "x.squeeze_()": lambda x: x.squeeze_(),
}

# ---- which apply -------------------------------------------------------------------------------------------


@torch.no_grad()
def run_on_reference(s: Subject, case: Case) -> list[Any]:
    """The results on the tensors that a value stands for."""
    return [case.run(plain.detach().clone()) for plain in s.reference(s.make())]


def applicable(s: Subject, table: Mapping[str, Callable[[Any], Any]]) -> list[Case]:
    """The cases that make sense for the sizes and dtype of a value: those that a plain tensor takes."""
    cases = [Case(name, run) for name, run in callable_on(s, table).items()]

    @torch.no_grad()
    def takes(case: Case) -> None:
        for plain in stand_ins(s):
            case.run(plain)

    return [case for case in cases if succeeds(takes, case)]


def callable_on(s: Subject, table: Mapping[str, Callable[[Any], Any]]) -> dict[str, Callable[[Any], Any]]:
    """The cases that call no method which a field of the class hides, such as ``t``."""
    fields = s.hiding_fields()
    return {name: run for name, run in table.items() if not fields.intersection(_names_in(run))}


def _names_in(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if hasattr(function, "__code__") else ()


def stand_ins(s: Subject) -> list[Tensor]:
    """What a value stands for, copied; of a class without a reference, numbers of its size and dtype."""
    x = s.make().detach()
    return [t.detach().clone() for t in s.reference(x)] if s.has_reference else [like(x)]


@once
def functional_cases(s: Subject) -> list[Case]:
    """The kit's own cases that apply, those of the author, and one for each rule that neither reaches."""
    return kit_cases(s) + author_cases(s) + _rule_cases(s)


# Python's errors for a call that has more arguments than a rule has parameters.
_TAKES_NOT = ("unexpected keyword argument", "positional arguments but")


@once
def argument_cases(s: Subject) -> list[Case]:
    """The calls with arguments that are not the default that apply, and that the class does not refuse."""
    return [case for case in applicable(s, ARGUMENTS) if not refuses(s, case)]


def refuses(s: Subject, case: Case, make: Callable[[], Any] | None = None) -> bool:
    """Whether a class has no answer to a call, or its rule no parameter for one of the arguments.

    Args:
        s: the class.
        case: the call.
        make: makes its argument; by default a value of the factory.
    """
    with Attempt() as attempt, torch.no_grad():
        case.run((make or s.make)())
    text = str(attempt.error)
    return refusal(attempt.error, s.is_own) is not None or any(words in text for words in _TAKES_NOT)


def kit_cases(s: Subject) -> list[Case]:
    """The kit's own cases that apply; none writes to its argument."""
    views = {name: view for name, view in VIEWS.items() if name != "x.detach()"}
    return applicable(s, FUNCTIONAL | views)


def _rule_cases(s: Subject) -> list[Case]:
    """Calls of rules that no other cases reach, and products with a vector that reach a rule."""
    calls = [*calls_of(unreached(s), like), *vector_calls(s, like)]
    return applicable(s, {case.name: case.run for case in calls})


@once
def unreached(s: Subject) -> list[Any]:
    """The ops and functions that have a rule which neither the kit's cases nor those of the author reach."""
    return missed_rules(s, kit_cases(s) + author_cases(s)) if s.declared else []


@once
def accepted(s: Subject) -> list[Case]:
    """The cases that the class takes in eager mode."""
    with torch.no_grad():
        cases = [case for case in functional_cases(s) if succeeds(lambda c=case: c.run(s.make()))]
    return [dataclasses.replace(case, works=True) for case in cases]


@once
def recorded(s: Subject) -> list[Case]:
    """The accepted cases that a plain tensor takes while gradients are recorded, and that have a derivative.

    A class without a reference may take arguments of the author that no tensor of its size takes, which stay.

    Raises:
        Skipped: the dtype of the class cannot require grad.
    """
    s.trainable()

    def record(case: Case) -> None:
        for plain in stand_ins(s):
            _differentiate(case.run(plain.requires_grad_()), plain)

    # That they work without gradients does not say that they do with them.
    calls = {} if s.has_reference else {case.name: case.run for case in author_cases(s)}
    own = calls.keys() - {case.name for case in applicable(s, calls)}
    cases = [case for case in accepted(s) if case.name in own or succeeds(record, case)]
    return [dataclasses.replace(case, works=False) for case in cases]


def _differentiate(result: Any, plain: Tensor) -> None:
    """Raises where PyTorch has no derivative of what it computed."""
    results = result if isinstance(result, list | tuple) else [result]
    live = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    if live:
        torch.autograd.grad(live, plain, [torch.ones_like(t) for t in live], allow_unused=True)
