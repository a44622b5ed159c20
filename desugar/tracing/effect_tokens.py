"""Effect tokens for ops with side effects: linear algebra that raises for a singular matrix, and custom ops.

PyTorch wraps such an op in `with_effects`, which takes a token and returns one; the tokens keep the ops in order.
Here the graph makes the first token. The last token is a hidden result of the function, so that the partitioner
keeps the ops in the forward. After the split, `_sink_tokens` takes the last token and returns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.ir.fx_utils import output_nodes, set_outputs


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
    private.detect_infra_mode(private.ModeKey.FUNCTIONAL)._tokens = tokens
    return tokens


def end_effects() -> None:
    """Forbids ops with side effects from now on: those of a backward have no place in the forward's order."""
    private.detect_infra_mode(private.ModeKey.FUNCTIONAL)._tokens = {}


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
