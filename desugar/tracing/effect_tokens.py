"""Ops with an effect besides their result: linear algebra that raises for a singular matrix, and custom ones.

A graph holds values only. PyTorch puts such an op into `with_effects`, which takes a token and gives one, so that
the ops keep their order. Here the first token is made in the graph, and the last is a hidden result of the function,
so that the partitioner keeps the ops in the forward; in the end a node takes the last token and gives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from desugar import _torch as private
from desugar.ir.fx_utils import output_nodes, set_outputs


class Tokens(dict[Any, Tensor]):
    """Kind of effect -> its last token, made when it is first asked for."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: Any) -> Tensor:
        self[kind] = token = torch.ops.prims._make_token.default()
        return token


def start_effects() -> Tokens:
    """From here on ops with an effect are taken in the trace that is in progress."""
    tokens = Tokens()
    private.detect_infra_mode(private.ModeKey.FUNCTIONAL)._tokens = tokens
    return tokens


def end_effects() -> None:
    """From here on such ops are refused: in a backward they would have no place in the forward's order."""
    private.detect_infra_mode(private.ModeKey.FUNCTIONAL)._tokens = {}


def sink_tokens(graph: fx.GraphModule, positions: Sequence[int]) -> None:
    """Ends the effects in the graph itself.

    Args:
        graph: A graph, which is changed.
        positions: Outputs that are tokens; they become None.
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
