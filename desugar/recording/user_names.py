"""Translates Dynamo's names: `L['self']._modules['layer']._parameters['weight']` becomes `self.layer.weight`.

A generated function (`desugar.api.call_of`) calls a module that was passed to `desugar.compile`. Dynamo compiles that
function, so the module is `module` there; `args` and `kwargs` are its parameters if the forward's are not simple.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from desugar import _torch as torch_private
from desugar.user_code import stack_of_node
from subclasses.layout import RAW

# ------------------------------------------------------------------------------------------------- expressions

_LOCAL = re.compile(r"L\[(['\"])(\w+)\1\]")
_CALL = re.compile(r"(?<![\w.'\"])(?:(module)(_\d+)?|args\[(\d+)\]|kwargs\['(\w+)'\])(?!\w)")
_BUILTIN = re.compile(r"G\['__builtins_dict__\w*'\]\['(\w+)'\]")
_STACK = re.compile(r"\b___stack(\d+)\b")  # a value that a resumed function finds on Python's stack
_MAIN = re.compile(r"G\['__import___main__'\]\.")
_IMPORTED = re.compile(r"G\['__import_(\w+)'\]")
_GLOBAL = re.compile(r"G\[(['\"])(\w+)\1\]")
_ENTRY = re.compile(r"\.(?:__dict__|_modules|_parameters|_buffers)\['(?:([^\W\d]\w*)|(\d+))'\]")
_CARRIER = re.compile(
    r"\._(\w+)_carrier\.size\(\)\[0\]"
)  # the tensor that carries a dynamic int of a declared class
_OF_CLASS = re.compile(r"dict\((type\([^()]+\))\.__dict__\)\['(\w+)'\]")
_EXTENT = re.compile(r"\.(size|stride)\(\)\[(\d+)\]")


def readable(text: str, what: Any = None) -> str:
    """Replaces Dynamo's names in an expression or a guard by the user's names.

    Args:
        text: Dynamo's text; it may name a local variable `L['x']` or `x`.
        what: The function or module that the user compiled, if known.
    """
    text = _LOCAL.sub(r"\2", text)
    if isinstance(what, nn.Module):
        parameters = _parameters(what)
        text = _CALL.sub(lambda match: _name_in_forward(match, parameters), text)
    text = _STACK.sub(r"value \1 from before the graph break", text)
    text = _MAIN.sub("", _BUILTIN.sub(r"\1", text))
    text = _IMPORTED.sub(lambda match: match[1].replace("_dot_", "."), text)
    text = _GLOBAL.sub(r"\2", text)
    text = _OF_CLASS.sub(r"\1.\2", text)
    text = _ENTRY.sub(lambda match: f".{match[1]}" if match[1] else f"[{match[2]}]", text)
    return _EXTENT.sub(r".\1(\2)", _CARRIER.sub(r".\1", text)).replace(f".{RAW}", ".")


def _name_in_forward(match: re.Match[str], parameters: list[inspect.Parameter]) -> str:
    """Returns the name, in the module's forward, of a variable of the function that calls the module."""
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if match[1]:
        # If the forward has a parameter named `module`, the generated function calls the module `module_<n>`.
        return (
            "self" if (match[2] is not None) == ("module" in plain and are_simple(parameters)) else match[0]
        )
    if match[4]:
        return match[4]
    number = int(match[3])
    if number < len(plain):
        return plain[number]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return match[0] if rest is None else f"{rest}[{number - len(plain)}]"


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def are_simple(parameters: Sequence[inspect.Parameter]) -> bool:
    """Returns whether all parameters are positional-or-keyword and have no defaults."""
    return all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)


# ------------------------------------------------------------------------------------------------------ graphs


def leaf_names(graph: fx.GraphModule, what: Any = None) -> tuple[str, ...]:
    """Returns the user's name for each argument of a Dynamo graph; the placeholder's name where Dynamo has none."""
    nodes = graph.graph.find_nodes(op="placeholder")
    names = torch_private.source_names(graph)
    return tuple(readable(name, what) or node.name for node, name in zip(nodes, names, strict=True))


def function_name(fn: Any, graph: fx.GraphModule | None = None) -> str:
    """Returns a name for the compiled function or graph.

    It is the name of the user's function or module. For a graph, it is the function that the graph was captured from,
    or "a graph" if its nodes have no stack trace.
    """
    if isinstance(fn, fx.GraphModule) or fn is None:
        stacks = (stack_of_node(node) for node in graph.graph.nodes) if graph is not None else iter(())
        return next((stack[0].function for stack in stacks if stack), "a graph")
    return (getattr(fn, "__qualname__", None) or type(fn).__name__).replace("<locals>.", "")
