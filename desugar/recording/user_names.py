"""What the user calls what Dynamo names: `L['self']._modules['layer']._parameters['weight']` is `self.layer.weight`.

A module that `desugar.compile` got is called by a function of ours (`desugar.api.call_of`), so of its frame the names
are `module`, and `args` and `kwargs` where its forward has other than plain parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from desugar import _torch as private
from desugar.user_code import stack_of_node

# ------------------------------------------------------------------------------------------------- expressions

_LOCAL = re.compile(r"L\[(['\"])(\w+)\1\]")
_CALL = re.compile(r"(?<![\w.'\"])(?:(module)(_\d+)?|args\[(\d+)\]|kwargs\['(\w+)'\])(?!\w)")
_BUILTIN = re.compile(r"G\['__builtins_dict__\w*'\]\['(\w+)'\]")
_MAIN = re.compile(r"G\['__import___main__'\]\.")
_IMPORTED = re.compile(r"G\['__import_(\w+)'\]")
_GLOBAL = re.compile(r"G\[(['\"])(\w+)\1\]")
_ENTRY = re.compile(r"\.(?:__dict__|_modules|_parameters|_buffers)\['(?:([^\W\d]\w*)|(\d+))'\]")
_CARRIER = re.compile(r"\._(\w+)_carrier\.size\(\)\[0\]")  # what holds a dynamic int of a declared class
_OF_CLASS = re.compile(r"dict\((type\([^()]+\))\.__dict__\)\['(\w+)'\]")
_EXTENT = re.compile(r"\.(size|stride)\(\)\[(\d+)\]")


def readable(text: str, what: Any = None) -> str:
    """An expression, or a guard, with Dynamo's names replaced by those of the user.

    Args:
        text: Dynamo's text; local variables may stand in it as `L['x']` or as `x`.
        what: What the user compiled, if that is known.
    """
    text = _LOCAL.sub(r"\2", text)
    if isinstance(what, nn.Module):
        parameters = _parameters(what)
        text = _CALL.sub(lambda found: _name_in_call(found, parameters), text)
    text = _MAIN.sub("", _BUILTIN.sub(r"\1", text))
    text = _IMPORTED.sub(lambda found: found[1].replace("_dot_", "."), text)
    text = _GLOBAL.sub(r"\2", text)
    text = _OF_CLASS.sub(r"\1.\2", text)
    text = _ENTRY.sub(lambda found: f".{found[1]}" if found[1] else f"[{found[2]}]", text)
    return _EXTENT.sub(r".\1(\2)", _CARRIER.sub(r".\1", text))


def _name_in_call(found: re.Match[str], parameters: list[inspect.Parameter]) -> str:
    """A name in the frame that calls a module, as the module's forward has it."""
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if found[1]:
        # A parameter of that name has it for itself.
        return (
            "self" if (found[2] is not None) == ("module" in plain and are_simple(parameters)) else found[0]
        )
    if found[4]:
        return found[4]
    number = int(found[3])
    if number < len(plain):
        return plain[number]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return found[0] if rest is None else f"{rest}[{number - len(plain)}]"


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a builtin tells nothing
        return []


def are_simple(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether parameters are given by position or name, and have no defaults."""
    return all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)


# ------------------------------------------------------------------------------------------------------ graphs


def leaf_names(graph: fx.GraphModule, what: Any = None) -> tuple[str, ...]:
    """What the user calls each argument of a graph of Dynamo's; one that Dynamo does not name has the graph's name."""
    nodes = graph.graph.find_nodes(op="placeholder")
    names = private.source_names(graph)
    return tuple(readable(name, what) or node.name for node, name in zip(nodes, names, strict=True))


def function_name(fn: Any, graph: fx.GraphModule | None = None) -> str:
    """What to call what was compiled: the user's function or module, else the function that a graph was made from."""
    if isinstance(fn, fx.GraphModule) or fn is None:
        stacks = (stack_of_node(node) for node in graph.graph.nodes) if graph is not None else iter(())
        return next((stack[0].function for stack in stacks if stack), "a graph")
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    return name.replace("<locals>.", "")
