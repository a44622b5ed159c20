"""The hard cases: every one is right where eager mode is right, or refused before anything is changed.

Each case is a scenario that calls a compiled function, and returns everything that a caller can see. It runs once in
eager mode and once compiled, through `desugar.compile` and behind Dynamo. It runs for a pair, a class with metadata, a
class whose outer size differs from its inner sizes, and a declared class. `EXPECTED` has the outcomes that differ from
eager mode, errors included:

- `refused`: a `DesugarError`, with the arguments untouched;
- `dynamo`: Dynamo refuses before it calls a backend, or AOTAutograd refuses a graph that desugar handed over with a
  logged reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from desugar import DesugarError
from tests.desugar.classes import Halves, Pair, Tagged, TwoTensor, make, plain_parts, rebuilt
from tests.desugar.idioms.running import difference as differs, record as seen
from tests.desugar.judge import (
    WAYS,
    backward,
    by_pass as by_pass,
    random_like,
    snapshot,
    tensors_of,
    versions,
)
from tests.doors import eager

KINDS = {"pair": TwoTensor, "metadata": Tagged, "outer": Halves, "declared": Pair}

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Scenario = Callable[[Compile, type], Any]
Around = Callable[[], Any]
CASES: dict[str, Scenario] = {}

# --------------------------------------------------------------------------------------------- how cases run


def case(scenario: Scenario) -> Scenario:
    """Registers a scenario under its name."""
    CASES[scenario.__name__] = scenario
    return scenario


def guarded(way: Callable[..., Any]) -> Compile:
    """Compiles; a refusal must leave the arguments as they were."""

    def compile_function(fn: Callable[..., Any]) -> Callable[..., Any]:
        compiled = way(fn)

        def call(*args: Any) -> Any:
            before = snapshot(args)
            try:
                return compiled(*args)
            except Exception as error:
                if outcome_of(error) != "raised":
                    assert before == snapshot(args), "a refused call changed its arguments"
                raise

        return call

    return compile_function


def outcome_of(error: BaseException) -> str:
    chain = [error, error.__cause__, error.__context__, getattr(error, "inner_exception", None)]
    if any(isinstance(e, DesugarError) for e in chain):
        return "refused"
    return "dynamo" if type(error).__module__.startswith("torch._dynamo") else "raised"


def raised(action: Callable[[], Any]) -> str:
    """The type of the error that an action raises, which eager mode raises too."""
    try:
        action()
    except RuntimeError as error:
        if outcome_of(error) != "raised":
            raise
        return type(error).__name__
    return "nothing"


def like(out: Any) -> Any:
    """A gradient of the result's own type."""
    return random_like(out, torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------------------- arguments, and calls of them


def one(cls: type) -> tuple[Any, ...]:
    return (make(cls, 2, 6),)


def leaf(cls: type) -> tuple[Any, ...]:
    return (make(cls, 2, 6, grad=True),)


def two(cls: type) -> tuple[Any, ...]:
    return leaf(cls) + leaf(cls)


def shared(cls: type) -> tuple[Any, ...]:
    """Two wrappers around the same inner tensors."""
    (x,) = one(cls)
    return x, rebuilt(x)


def overlapping(cls: type) -> tuple[Any, ...]:
    base = torch.arange(8.0)
    return *one(cls), base[:6], base[2:]


def called(
    fn: Callable[..., Any],
    arguments: Callable[[type], tuple[Any, ...]],
    around: Around = contextlib.nullcontext,
) -> Scenario:
    """One call within a context manager: its results, and the arguments after it."""

    def scenario(compile: Compile, cls: type) -> Any:
        with around():
            args = arguments(cls)
            return compile(fn)(*args), args, versions(tensors_of(args))

    return scenario


def trained(
    fn: Callable[..., Any],
    arguments: Callable[[type], tuple[Any, ...]],
    missing: Sequence[int] = (),
    around: Around = contextlib.nullcontext,
    during: Around = contextlib.nullcontext,
) -> Scenario:
    """One call, and the backward of its results but for some; a record of an argument has its gradient."""

    def scenario(compile: Compile, cls: type) -> Any:
        result, args, counters = called(fn, arguments, around)(compile, cls)
        with during():
            backward(result, missing)
        return result, args, counters

    return scenario


def differentiated(x: Any, grad: Any) -> Scenario:
    """The gradient for a given cotangent."""

    def scenario(compile: Compile, cls: type) -> Any:
        argument, cotangent = x(cls), grad(cls)
        return torch.autograd.grad(compile(lambda x: x * x)(argument), argument, cotangent)

    return scenario


def conditional(with_gradients: bool) -> Scenario:
    """In eager mode `torch.cond` runs Dynamo, which does not take all such operands; `if` gives the expected result."""
    flag = torch.tensor(not with_gradients)

    def scenario(compile: Compile, cls: type) -> Any:
        def branches(x: Any, flag: Tensor) -> Any:
            if compile is eager:
                return x.sin() if flag else x.cos()
            return torch.cond(flag, lambda x: x.sin(), lambda x: x.cos(), (x,))

        return (trained if with_gradients else called)(
            branches, lambda cls: (make(cls, 2, 6, grad=with_gradients), flag)
        )(compile, cls)

    return scenario


def written_afterwards(fn: Callable[..., Any], second: Callable[[type], Any]) -> Scenario:
    """The error of a backward after a write to the second argument."""

    def scenario(compile: Compile, cls: type) -> Any:
        other = second(cls)
        out = compile(fn)(*leaf(cls), other)
        other.mul_(2)
        return raised(lambda: backward(out))

    return scenario


def assign_inner(x: Any) -> Any:
    name = x.__tensor_flatten__()[0][0]
    setattr(x, name, getattr(x, name) * 3)
    return x + 1


# -------------------------------------------------------------------------------------------------- the cases

CASES |= {
    "c01_shared_inner_mutated": called(lambda x, y: (x.mul_(2), x + y)[1], shared),
    "c01_shared_inner_mutated_through_the_second": called(lambda x, y: (y.add_(1), x * 2)[1], shared),
    "c02_one_argument_twice_mutated": called(lambda x, y: (x.mul_(2), x + y)[1], lambda cls: one(cls) * 2),
    "c02_overlapping_views_mutated": called(lambda x, a, b: (a.add_(1), x * b)[1], overlapping),
    "c03_some_outputs_in_the_backward": trained(lambda x, y: (x * 2, y.sin(), x * y), two, (0, 2)),
    "c04_plain_gradient_for_a_subclass": differentiated(
        lambda cls: make(cls, 2, 6, grad=True), lambda cls: torch.ones(2, 6)
    ),
    "c04_subclass_gradient_for_a_plain_result": differentiated(
        lambda cls: torch.ones(2, 6, requires_grad=True), lambda cls: make(cls, 2, 6)
    ),
    "c05_two_outputs_alias_an_intermediate": trained(
        lambda x: (lambda y: (y.view(12), y[0]))(x * 2), leaf, (1,)
    ),
    "c05_an_intermediate_and_its_view": called(lambda x: (lambda y: (y, y.t()))(x * 2), one),
    "c06_unsqueeze_": called(
        lambda x: (x.unsqueeze_(0), x * 2)[1],
        lambda cls: one(cls if cls is not Halves else TwoTensor),  # Halves refuses it in eager mode
    ),
    "c06_t_of_a_plain_tensor": called(
        lambda x, y: (y.t_(), x * y)[1], lambda cls: (*one(cls), torch.randn(6, 1))
    ),
    "c08_an_unused_input": trained(lambda x, y: x * 2, two),
    "c09_cond": conditional(False),
    "c09_cond_with_gradients": conditional(True),
    "c11_slicing_under_inference_mode": called(
        lambda x: (x[1:] * 2, x[1:3] + 1), lambda cls: (make(cls, 4, 6),), torch.inference_mode
    ),
    "c12_a_view_with_gradients": trained(lambda x: x.view(2, 6), leaf),
    "c12_an_output_is_the_input": called(lambda x: (x, x * 2), leaf),
    "c13_buffers": lambda compile, cls: (
        lambda norm: (compile(norm)(torch.randn(4, 6)), dict(norm.named_buffers()))
    )(nn.BatchNorm1d(6)),
    "c13_a_mutated_input": called(lambda x: x.mul_(2), one),
    "c13_a_mutated_plain_input_with_gradients": trained(
        lambda x, y: (y.mul_(3), x * y)[1], lambda cls: (*leaf(cls), torch.ones(6))
    ),
    "c13_an_inner_tensor_assigned": called(assign_inner, one),
    "c14_nested": trained(
        lambda x: (x * x).sin(), lambda cls: (TwoTensor(*one(cls), *one(cls)).requires_grad_(),)
    ),
    "c17_checkpoint_inside": trained(
        lambda x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False), leaf
    ),
    "c17_checkpoint_outside": lambda compile, cls: trained(
        functools.partial(checkpoint, compile(lambda x: x.sin() * x), use_reentrant=False), leaf
    )(eager, cls),
    "c17_compiled_autograd": trained(
        lambda x: x.sin(),
        leaf,
        during=lambda: torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
    ),
    "c17_save_on_cpu": trained(lambda x: x.sin() * x, leaf, around=torch.autograd.graph.save_on_cpu),
    "c22_a_saved_input_changed_afterwards": written_afterwards(lambda x, w: x * w, lambda cls: torch.ones(6)),
    "c22_a_saved_wrapper_changed_afterwards": written_afterwards(
        lambda x, y: x * y, lambda cls: make(cls, 2, 6)
    ),
}


@case
def c07_double_backward(compile, cls):
    (x,) = leaf(cls)
    out = compile(lambda x: x.sin() * x)(x)
    (first,) = torch.autograd.grad(out, x, like(out), create_graph=True)
    return first, torch.autograd.grad(first, x, like(first))


@case
def c10_the_callers_gradient(compile, cls):
    (x,) = leaf(cls)
    out = compile(lambda x: x.sin())(x)
    grad = like(out)
    before = [part.clone() for part in plain_parts(grad)]
    out.backward(grad)
    return list(map(torch.equal, plain_parts(grad), before)), grad, x.grad


@case
def c12_a_view_of_an_input_written_to(compile, cls):
    (x,) = one(cls)
    view = compile(lambda x: x.view(2, 6))(x)
    view.add_(1)
    return x, view


@case
def c13_parameters(compile, cls):
    w = nn.Parameter(make(cls, 2, 6))

    def step(x):
        with torch.no_grad():
            w.mul_(2)
        return x * w

    return compile(step)(torch.ones(6)), w.detach()


@case
def c15_dynamic_sizes(compile, cls):
    compiled, found = compile(lambda x: (x * 2, x.sin())), []
    for rows in (4, 5, 0, 1, 7, 2):
        x = make(cls, rows, 6, grad=True)
        found.append((compiled(x), x))
        backward(found[-1][0])
    return found


@case
def c16_dropout(compile, cls):
    # While symbols are traced, dropout of a tensor is another op than in eager mode, which Halves joins for.
    of_ones = lambda x: x * F.dropout(torch.ones(6), 0.5)  # noqa: E731
    compiled = compile(of_ones if cls is Halves else lambda x: F.dropout(x, 0.5))
    (x,), found = leaf(cls), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        out = compiled(x)
        found.append((out, torch.autograd.grad(out, x, torch.ones_like(out)), torch.rand(1)))
    return found


@case
def c17_saved_tensor_hooks(compile, cls):
    """Once each, and late: in the call that compiles, and in the next one."""
    (x,), packed, unpacked, compiled = leaf(cls), [], [], compile(lambda x: x.sin() * x)
    hooks = (lambda t: (packed.append(t), t)[1]), (lambda t: (unpacked.append(t), t)[1])
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        outs = [compiled(x) for _ in range(2)]
    late = not unpacked
    backward(outs)
    return late, len(packed) == len(unpacked), x.grad


@case
def c18_modes(compile, cls):
    (x,), w = leaf(cls), torch.randn(6, 3)
    compiled = compile(lambda x, w: ((x * 2).sin(), x @ w))
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    modes = torch.enable_grad(), torch.no_grad(), autocast, torch.inference_mode()
    return [mode(compiled)(x, w) for mode in modes]


@case
def c19_retain_graph(compile, cls):
    (x,) = leaf(cls)
    out = compile(lambda x: x.sin())(x)
    out.backward(like(out), retain_graph=True)
    backward(out)
    return x.grad, raised(lambda: backward(out))


@case
def c20_threads(compile, cls):
    compiled = compile(lambda x: x.sin() * x)
    inputs = [make(cls, 2, 6, grad=True) for _ in range(4)]

    def work(x):
        out = compiled(x)
        backward(out)
        return out.detach()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, inputs)), inputs


@case
def c21_an_error_inside(compile, cls):
    compiled, (x,) = compile(lambda x, w: (x.sin(), torch.ones(3) @ w)), one(cls)
    with pytest.raises(RuntimeError, match=r"inconsistent tensor size|size mismatch|must have same"):
        compiled(x, torch.ones(4))
    return x, x._version, compiled(x, torch.ones(3))


# --------------------------------------------------------------------------------------------------- outcomes

# PyTorch's higher-order ops fail on wrappers; declared classes take part in them.
BY_HAND = {"pair": "dynamo", "metadata": "dynamo", "outer": "dynamo"}

# Maps a case to its outcomes by desugar and behind Dynamo, if one is not right; a dict where classes differ.
EXPECTED: dict[str, tuple[Any, Any]] = {
    "c06_unsqueeze_": ("right", "dynamo"),
    "c06_t_of_a_plain_tensor": ("right", "dynamo"),
    "c09_cond": (BY_HAND, BY_HAND),
    "c09_cond_with_gradients": (BY_HAND, BY_HAND),
    "c13_an_inner_tensor_assigned": ("right", "dynamo"),
}


@pytest.mark.sweep(68)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Anomaly")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_hard_case(name, kind, way):
    if (name, kind, way) == ("c06_unsqueeze_", "metadata", "pass"):
        pytest.skip("behind the graph break Dynamo fails in the class's own dispatch, in stock as well")
    scenario, cls = CASES[name], KINDS[kind]
    want = seen(scenario(eager, cls))
    torch.manual_seed(0)
    try:
        difference = differs(seen(scenario(guarded(WAYS[way]), cls)), want)
    except Exception as error:
        outcome = outcome_of(error)
        if outcome == "raised":
            raise
    else:
        assert difference is None, difference
        outcome = "right"
    expected = EXPECTED.get(name, ("right", "right"))[list(WAYS).index(way)]
    expected = expected.get(kind, "right") if isinstance(expected, dict) else expected
    assert outcome == expected, "the table must have this outcome"


def test_every_expectation_is_of_a_case():
    assert set(EXPECTED) <= set(CASES)
