"""The functions that a higher-order op is given, as functions over plain tensors.

What a function returns is found out by running it once on fake tensors, outside of every mode that records. Results
that are operands are told from results that alias one: PyTorch takes neither from a function over plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    HigherOrderOperator,
    TreeSpec,
    fresh_fakes,
    functional_storage_key,
    is_recorded,
    storage_key,
    trace_graph,
    tree_flatten,
)
from subclasses.errors import DispatchError
from subclasses.higher_order.values import Part, describe, num_leaves, unwrap_value

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Results:
    """What a function returns.

    Attributes:
        treespec: the container of the results.
        parts: one per result.
        leaves: the plain tensors and ints in them, as fake tensors.
        sources: per leaf, the plain operand that it is, or None.
        aliases: the leaves that share memory with an operand or with another leaf before them.
        written: the plain operands that the function writes to.
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
        """The places of the leaves of one result."""
        start = sum(map(num_leaves, self.parts[:number]))
        return range(start, start + num_leaves(self.parts[number]))


def find_results(fn: Call, plain: Sequence[Any]) -> Results:
    """Runs a function over plain operands on fake ones.

    Args:
        fn: from plain operands to results that may be wrappers.
        plain: the operands.
    """
    with fresh_fakes(plain) as fakes:
        results, treespec = tree_flatten(fn(*fakes))
        leaves: list[Any] = []
        parts = tuple([unwrap_value(result, leaves) for result in results])
        places = {id(fake): n for n, fake in enumerate(fakes) if isinstance(fake, Tensor)}
        sources = tuple([places.get(id(leaf)) for leaf in leaves])
        written = frozenset([n for n, fake in enumerate(fakes) if isinstance(fake, Tensor) and fake._version])
        return Results(treespec, parts, tuple(leaves), sources, _find_aliases(fakes, leaves), written)


def _find_aliases(operands: Sequence[Any], leaves: Sequence[Any]) -> frozenset[int]:
    met = {storage_key(t) for t in operands if isinstance(t, Tensor)}
    aliases = set()
    for n, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if storage_key(leaf) in met:
                aliases.add(n)
            met.add(storage_key(leaf))
    return frozenset(aliases)


def over_plain(fn: Call, wrap: Callable[[Sequence[Any]], Sequence[Any]]) -> Call:
    """A function of plain operands, from one of wrapped ones; its results may be wrappers."""
    return lambda *plain: fn(*wrap(plain))


def plain_function(fn: Call, results: Results, wanted: Sequence[int]) -> Call:
    """A function from plain operands to those leaves of its results that are wanted, none of which is an alias."""

    def on_plain(*plain: Any) -> tuple[Any, ...]:
        leaves: list[Any] = []
        for result in tree_flatten(fn(*plain))[0]:
            unwrap_value(result, leaves)
        return tuple([leaves[n].clone() if n in results.aliases else leaves[n] for n in wanted])

    return on_plain


def as_graphs(fns: Iterable[Call], plain: Sequence[Any], dynamic_ints: bool = False) -> list[Call]:
    """Functions that write to their operands, as graphs: PyTorch functionalizes them where no wrapper may be made."""
    return [trace_graph(fn, plain, dynamic_ints) for fn in fns]


def check_not_random(op: HigherOrderOperator, fns: Iterable[Call], plain: Sequence[Any]) -> None:
    """Raises DispatchError if a function draws random numbers, for its derivative computes it once more.

    Only where a graph is made of the derivative: what merely asks for sizes may run with autograd's own later.
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
                    f"derivative would draw others; draw them outside and pass them as operands"
                )


def apart(plain: Sequence[Any]) -> list[Any]:
    """Operands of which no two share memory, as the op asks: copies of those that do with one before them."""
    met: set[int] = set()
    operands = []
    for operand in plain:
        if isinstance(operand, Tensor):
            key = functional_storage_key(operand)
            operand = operand.clone() if key in met else operand
            met.add(key)
        operands.append(operand)
    return operands


def example_results(fn: Any) -> list[Any]:
    """What Dynamo noted of the results of a function that it traced; nothing for other functions."""
    if not isinstance(fn, torch.fx.GraphModule):
        return []
    (output,) = fn.graph.find_nodes(op="output")
    return [node.meta.get("example_value") for node in output.all_input_nodes]
