"""Rejects mutations that functionalization replays incorrectly, and orders other side effects by effect tokens.

For a write to an expanded tensor, functionalization sums the writes of all elements that share one memory location. For
a write to an unfolded tensor, it fills the elements between the windows of `unfold` with zeros. RNG reseeding is
rejected, too.

Other ops with side effects are custom ops, and linear algebra that raises for a singular matrix. PyTorch wraps them in
`with_effects`, which takes a token and returns a token; the tokens keep the ops in order. Here the graph makes the
first token. The last token is a hidden result of the function, so that the partitioner keeps the ops in the forward.
After the split, `_sink_tokens` takes the last token and returns nothing.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor, fx

from desugar import _torch as torch_private
from desugar.errors import DesugarError, user_line
from desugar.ir.fx_utils import output_nodes, set_outputs
from desugar.ir.values import plain_parts


def check_target(name: str, target: Tensor) -> None:
    """Raises if an op is about to write to an expanded or unfolded tensor.

    Args:
        name: The op's name, for the message.
        target: The tensor that the op writes to.

    Raises:
        DesugarError: Several elements of the tensor share one memory location, or `unfold` made it.
    """
    extents = zip(target.size(), target.stride(), strict=True)
    repeats = any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in extents)
    if repeats or any(_is_unfolded(part) for part in plain_parts(target)):
        how = "expanded" if repeats else "unfolded"
        raise DesugarError(
            f"{name} writes to an {how} tensor of size {tuple(target.shape)}",
            where=user_line(),
            instead="write to the tensor that it is a view of, or to a clone()",
            stock_is_wrong=True,
        )


def _is_unfolded(tensor: Any) -> bool:
    views = (
        torch_private.get_view_meta_sequence(tensor.elem)
        if isinstance(tensor, torch_private.FunctionalTensor)
        else ()
    )
    return any("unfold" in type(view).__name__ for view in views)


@functools.cache
def functional_mode_class() -> type:
    """Returns a class of `FunctionalTensorMode` that also checks the tensors that ops write to."""

    class CheckingFunctionalMode(torch_private.FunctionalTensorMode):
        supports_higher_order_operators = True

        def __enter__(self) -> Any:
            # Dynamo may have run the function's `manual_seed` already; a new seed makes a second call detectable.
            torch.default_generator.manual_seed(secrets.randbits(63))
            self.rng = _rng_state()
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = getattr(func, "_schema", None)
            if schema is None:  # a higher-order op registers its functions by the exact type of a mode
                return func.python_key_table[torch_private.FunctionalTensorMode](
                    self, *args, **(kwargs or {})
                )
            if torch.Tag.nondeterministic_seeded in func.tags:
                check_rng(self.rng)
            if (rule := _rule_for_mode(func)) is not None:
                check_rng(self.rng)  # the rule enters this mode again
                return rule(self, func, types, args, kwargs or {})
            if not schema.is_mutable or torch.Tag.inplace_view in func.tags:
                return super().__torch_dispatch__(func, types, args, kwargs)
            targets = _mutated_arguments(func, args, kwargs or {})
            for target in targets:
                check_target(func._opname, target)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not _counts_versions(func):
                torch.autograd.graph.increment_version(targets)
            return result

    return CheckingFunctionalMode


def _rule_for_mode(func: Any) -> Any:
    """Returns the rule of a custom op for `FunctionalTensorMode`; PyTorch finds rules by the exact type of a mode."""
    is_custom = func.namespace not in ("aten", "prims")
    return (
        torch_private.find_torch_dispatch_rule(func, torch_private.FunctionalTensorMode)
        if is_custom
        else None
    )


def _rng_state() -> tuple[int, Tensor]:
    with torch_private.disable_current_modes(), torch_private.DisableTorchFunction():
        return torch.default_generator.initial_seed(), torch.default_generator.get_state()


def check_rng(before: tuple[int, Tensor]) -> None:
    """Raises if the function has reseeded the default generator.

    Ops on fake tensors draw no random numbers, so a trace does not advance the generator. Another thread may draw
    numbers during the trace: the seed then stays the same, and the state differs from the initial state of that seed.

    Args:
        before: Seed and state of the generator before the function ran.

    Raises:
        DesugarError: The seed or the state has changed.
    """
    seed, state = _rng_state()
    with torch_private.disable_current_modes(), torch_private.DisableTorchFunction():
        if seed == before[0] and torch.equal(state, before[1]):
            return
        initial = torch.Generator().manual_seed(seed).get_state()
        if seed == before[0] and threading.active_count() > 1 and not torch.equal(state, initial):
            return
    raise DesugarError(
        "the function sets the state of the random number generator (torch.manual_seed, set_rng_state)",
        where=user_line(),
        instead="seed outside the compiled function, or pass a torch.Generator",
        stock_is_wrong=True,
    )


def _mutated_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the functional tensors that an op mutates, according to its schema."""
    targets = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written: Any = args[number] if number < len(args) else kwargs.get(argument.name)
            leaves = optree.tree_leaves(written, none_is_leaf=True)
            targets += [target for target in leaves if isinstance(target, torch_private.FunctionalTensor)]
    return targets


@functools.cache
def _counts_versions(func: Any) -> bool:
    """Whether autograd increments the version counters of the tensors that an op writes to.

    Otherwise the op's own kernel increments them in eager mode, as for `torch._foreach_mul_` and most custom ops.
    Nothing increments the counters of the buffers that `batch_norm` writes to.
    """
    is_counted = func.namespace == "aten" and not func.__name__.startswith(("_foreach_", "_fused_", "_amp_"))
    return is_counted or torch_private.has_kernel(func.name(), "ADInplaceOrView")


# ---- effect tokens -----------------------------------------------------------------------------------------


class Tokens(dict[Any, Tensor]):
    """Kind of effect -> its last token; makes the first token on first access."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: Any) -> Tensor:
        self[kind] = token = torch.ops.prims._make_token.default()
        return token


def start_effects() -> Tokens:
    """Allows ops with side effects in the current trace from now on; returns the tokens."""
    tokens = Tokens()
    torch_private.detect_infra_mode(torch_private.ModeKey.FUNCTIONAL)._tokens = tokens
    return tokens


def end_effects() -> None:
    """Forbids ops with side effects from now on: a backward's effects have no place in the forward's order."""
    torch_private.detect_infra_mode(torch_private.ModeKey.FUNCTIONAL)._tokens = {}


def sink_tokens(graph: fx.GraphModule, positions: Sequence[int]) -> None:
    """Consumes the last tokens inside the graph.

    Args:
        graph: The graph; changed in place.
        positions: Positions of the outputs that are tokens; these outputs become None.
    """
    if not positions:
        return
    outputs = output_nodes(graph)
    (end,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(end):
        sink = graph.graph.call_function(
            torch.ops.prims._sink_tokens.default, ([outputs[position] for position in positions],)
        )
    sink.meta["val"] = None
    set_outputs(graph, [None if n in set(positions) else node for n, node in enumerate(outputs)])
