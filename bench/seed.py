"""Measures the cost of saved tensors, which are known to be plain, in a backward.

*In isolation*: from the saved tensors to the list that the compiled graph takes. AOTAutograd started with a loop that
tests whether each is a subclass. The text generated here does no work per tensor.
*The whole prologue*: the Python that runs in a backward before its compiled graph starts, in the installed PyTorch and
here, for the same function. For both, the saved tensors are an attribute of the context, so autograd's own unpacking
is not included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before AOTAutograd, which has a circular import with it
import torch._functorch._aot_autograd.runtime_wrappers as runtime_wrappers
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import desugar
from bench.subjects import copy_function
from desugar.backward.emit import VariantEmitter
from desugar.codegen.text import join_saved
from desugar.ir.stages import FromTangent
from subclasses.source_text.build import build_functions
from subclasses.source_text.emitter import Emitter

Call = Callable[[], Any]

COUNTS = (5, 10, 20, 50)

# ---------------------------------------------------------------------------------------------------------
# in isolation
# ---------------------------------------------------------------------------------------------------------


def unwrap_by_loop(args: tuple[Any, ...]) -> list[Any]:
    """Unwraps arguments of unknown types."""
    unwrapped: list[Any] = []
    for x in args:
        if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x):
            unwrapped += [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        else:
            unwrapped.append(x)
    return unwrapped


def make_isolated(count: int) -> dict[str, Call]:
    """Returns calls of the loop and of the generated text on `count` saved tensors."""
    saved = tuple(torch.rand(8, 8) for _ in range(count))
    out = Emitter()
    out.writeline("def unwrap(saved):")
    with out.indent():
        out.writeline(f"return [{', '.join(join_saved([f'saved[{n}]' for n in range(count)], count))}]")
    unwrap: Any = build_functions(out.source, out.namespace, filename="<saved>", owner=saved[0])["unwrap"]
    check_same(unwrap(saved), saved)
    check_same(unwrap_by_loop(saved), saved)
    return {"isinstance loop": partial(unwrap_by_loop, saved), "generated": partial(unwrap, saved)}


def check_same(actual: list[Any], expected: Any) -> None:
    """Raises AssertionError unless both lists contain the same objects."""
    if len(actual) != len(expected) or any(x is not y for x, y in zip(actual, expected, strict=True)):
        raise AssertionError(f"expected the {len(expected)} tensors themselves, got {len(actual)} others")


# ---------------------------------------------------------------------------------------------------------
# the whole prologue
# ---------------------------------------------------------------------------------------------------------


def weigh(x: Tensor, *weights: Tensor) -> Any:
    """Computes a function whose backward reads one gradient and every saved weight."""
    return sum(x * w for w in weights)


def make_args(count: int) -> tuple[Tensor, ...]:
    x: Any = TwoTensor(torch.rand(8, 8), torch.rand(8, 8))
    return x.requires_grad_(), *(torch.rand(8, 8) for _ in range(count))


def make_prologues(count: int, reads_memory: bool = False) -> dict[str, Call]:
    """Returns both prologues, from the call of a backward to the call of its graph.

    Before compiled code that reads memory (Inductor's), ours also checks whether a gradient is lazily negated. The
    installed PyTorch does not check it, and computes a wrong result for such a gradient.
    """
    return {"installed PyTorch": make_stock(count), "generated": make_ours(count, reads_memory)}


def make_stock(count: int) -> Call:
    """Returns a call of the installed release's backward, whose graph and epilogue return their arguments."""
    args = make_args(count)
    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=lambda *_: hand_back
    )
    y = torch.compile(copy_function(weigh), backend=backend, fullgraph=True)(*args)
    node = y.grad_fn
    function = node._forward_cls
    function._bw_epilogue_fn = staticmethod(hand_back)
    ctx = SimpleNamespace(
        saved_tensors=args[1:],
        symints=node.symints,
        opaque_objects=node.opaque_objects,
        maybe_clear_saved_tensors=lambda: None,
        _tensors_no_vc_check=(),
    )
    tangent = TwoTensor(torch.ones(8, 8), torch.ones(8, 8))
    return in_a_backward(lambda: function.backward(ctx, [tangent]), args[1:])


def hand_back(args: list[Any]) -> list[Any]:
    """A compiled graph that returns its arguments."""
    return args


hand_back._boxed_call = True  # type: ignore[attr-defined]


class PrologueEmitter(VariantEmitter):
    """Emits a variant of the backward that returns the arguments of its graph."""

    def emit_prologue(self, sources: tuple[Any, ...]) -> None:
        tangents = {number: f"tangent{number}" for number, _ in self.interface.tangents}
        self.out.writeline(f"def prologue(ctx, {', '.join(tangents.values())}):")
        with self.out.indent():
            arrived = list(self.interface.tangents)
            items = self.emit_unwrapping(arrived, self.emit_check(tangents, arrived))
            self.out.writeline("saved = ctx.saved_tensors")
            reads = [items[s.index] if isinstance(s, FromTangent) else self.plan.reads[s] for s in sources]
            self.out.writeline(f"return [{', '.join(join_saved(reads, len(self.plan.saved)))}]")


def make_ours(count: int, reads_memory: bool) -> Call:
    """Returns a call of the lines of a generated backward up to the call of its graph."""
    args = make_args(count)
    variants = desugar.trace(weigh, *args).variants
    assert variants is not None and variants.plan is not None
    # The generated function is the backward itself: nothing runs before it.
    assert variants.plan.is_replaced
    out = Emitter()
    out.reserve("ctx", "saved", "tangent0")
    on_mismatch = out.bind(variants.run_another, "another_backward")
    emitter = PrologueEmitter(
        out, variants.interface, variants.plan, on_mismatch, autocast=False, reads_memory=reads_memory
    )
    emitter.emit_prologue(variants.partition.backward_inputs)
    prologue: Any = build_functions(out.source, out.namespace, filename="<prologue>", owner=variants)[
        "prologue"
    ]
    # As for AOTAutograd, the saved tensors are a plain attribute of the context.
    ctx, tangent = SimpleNamespace(saved_tensors=args[1:]), TwoTensor(torch.ones(8, 8), torch.ones(8, 8))
    return in_a_backward(partial(prologue, ctx, tangent), args[1:])


def in_a_backward(call: Call, saved: tuple[Any, ...]) -> Call:
    """Checks the result of a call and returns the call.

    The caller turns gradients off before it times the call, since that costs more than the call.
    """
    with torch.no_grad():
        check_same(call()[: len(saved)], saved)
    return call


TABLES = {"in isolation": make_isolated}
if hasattr(runtime_wrappers, "_codegen_compiled_backward"):  # missing in older releases
    TABLES["the whole prologue"] = make_prologues
    TABLES["the whole prologue before compiled code"] = partial(make_prologues, reads_memory=True)
