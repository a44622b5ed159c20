"""The functions that are passed to a higher-order op, as functions over plain tensors.

A run of a function on fake tensors, outside of every recording mode, shows its results. A result that is an operand is
distinguished from a result that aliases one: PyTorch accepts neither from a function over plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator, TreeSpec, storage_key, tree_flatten
from subclasses._torch_tracing import fresh_fakes, functional_storage_key, is_recorded, trace_graph
from subclasses.errors import DispatchError
from subclasses.higher_order.values import Part, describe, num_leaves, unwrap_value

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a function.

    Attributes:
        treespec: the container of the results.
        parts: the description of each result.
        leaves: the plain tensors and ints that the results flatten to, as fake tensors.
        sources: for each leaf, the slot of the plain operand that it is, or None.
        aliases: indices of the leaves that share memory with an operand or an earlier leaf.
        written: slots of the plain operands that the function writes to.
    """

    treespec: TreeSpec
    parts: tuple[Part, ...]
    leaves: tuple[Any, ...]
    sources: tuple[int | None, ...]
    aliases: frozenset[int]
    written: frozenset[int]

    def __str__(self) -> str:
        leaves = iter(self.leaves)
        return f"({', '.join(describe(part, leaves) for part in self.parts)})"

    def leaves_of(self, number: int) -> range:
        """Returns the indices of the leaves of one result."""
        start = sum(map(num_leaves, self.parts[:number]))
        return range(start, start + num_leaves(self.parts[number]))


def infer_results(fn: Call, plain: Sequence[Any]) -> Results:
    """Infers the results of a function over plain operands by running it on fake tensors.

    Args:
        fn: takes plain operands and returns results that may be wrappers.
        plain: the operands.
    """
    with fresh_fakes(plain) as fakes:
        results, treespec = tree_flatten(fn(*fakes))
        leaves: list[Any] = []
        parts = tuple([unwrap_value(result, leaves) for result in results])
        slots = {id(fake): n for n, fake in enumerate(fakes) if isinstance(fake, Tensor)}
        sources = tuple([slots.get(id(leaf)) for leaf in leaves])
        written = frozenset([n for n, fake in enumerate(fakes) if isinstance(fake, Tensor) and fake._version])
        return Results(treespec, parts, tuple(leaves), sources, _find_aliases(fakes, leaves), written)


def _find_aliases(operands: Sequence[Any], leaves: Sequence[Any]) -> frozenset[int]:
    seen = {storage_key(t) for t in operands if isinstance(t, Tensor)}
    aliases = set()
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if storage_key(leaf) in seen:
                aliases.add(n)
            seen.add(storage_key(leaf))
    return frozenset(aliases)


def accept_plain(fn: Call, wrap: Callable[[Sequence[Any]], Sequence[Any]]) -> Call:
    """Converts a function of wrapped operands to one of plain operands; its results may be wrappers."""
    return lambda *plain: fn(*wrap(plain))


def select_leaves(fn: Call, results: Results, wanted: Sequence[int]) -> Call:
    """Returns a function from plain operands to the wanted leaves of its results; leaves that alias are cloned."""

    def on_plain(*plain: Any) -> tuple[Any, ...]:
        leaves: list[Any] = []
        for result in tree_flatten(fn(*plain))[0]:
            unwrap_value(result, leaves)
        return tuple([leaves[n].clone() if n in results.aliases else leaves[n] for n in wanted])

    return on_plain


def trace_graphs(fns: Iterable[Call], plain: Sequence[Any], dynamic_ints: bool = False) -> list[Call]:
    """Traces functions that write to operands: PyTorch functionalizes graphs, where no wrapper may be created."""
    return [trace_graph(fn, plain, dynamic_ints) for fn in fns]


def check_not_random(op: HigherOrderOperator, fns: Iterable[Call], plain: Sequence[Any]) -> None:
    """Raises DispatchError if a function draws random numbers, because its derivative computes it a second time.

    The check runs only if ops are recorded. A run that merely infers sizes may use autograd's own derivative later.
    """
    for fn in fns if is_recorded() else ():
        graph = trace_graph(fn, plain, dynamic_ints=False)
        nodes = [
            n for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for n in part.graph.nodes
        ]
        for node in nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise DispatchError(
                    f"{op.name()}: a function that it is given draws random numbers ({node.target}), and the "
                    "derivative would draw others",
                    code="graph-refused",
                    hint="draw them outside and pass them as operands",
                )


def clone_aliases(plain: Sequence[Any]) -> list[Any]:
    """Clones operands that share memory with an earlier one, because the op rejects operands that alias."""
    seen: set[int] = set()
    operands = []
    for operand in plain:
        if isinstance(operand, Tensor):
            key = functional_storage_key(operand)
            operand = operand.clone() if key in seen else operand
            seen.add(key)
        operands.append(operand)
    return operands


def example_results(fn: Any) -> list[Any]:
    """Returns the example results that Dynamo recorded for a function that it traced; empty for other functions."""
    if not isinstance(fn, torch.fx.GraphModule):
        return []
    (output,) = fn.graph.find_nodes(op="output")
    return [node.meta.get("example_value") for node in output.all_input_nodes]
