"""Records a call as plain data: results, arguments and state after it, gradients, and shared memory.

An outcome is a dictionary of strings, numbers, lists and plain tensors, which `torch.load(weights_only=True)` reads in
another process. Subclasses are recorded by their class, their metadata and the plain tensors inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from desugar.compare.import_names import signature_of
from desugar.explain.collecting.effects import with_inner
from desugar.ir.values import dynamic_names, is_wrapper, take_apart

Outcome = dict[str, Any]
Entry = dict[str, Any]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

# --------------------------------------------------------------------------------------------------- leaves


def leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested tuples, lists, mappings and dataclasses, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves_of(part, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        for number, part in enumerate(value):
            yield from leaves_of(part, f"{path}.{names[number]}" if names else f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves_of(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def parts_of(tensor: Tensor, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors inside a tensor, each with its path; a plain tensor is its own part."""
    return ((name, part) for name, part in with_inner([(path, tensor)]) if not is_wrapper(part))


def tangent_of(tensor: Tensor) -> Tensor:
    """Returns the gradient of a tensor's sum: ones, in a tensor of the same class."""
    with torch.no_grad():
        if not is_wrapper(tensor):
            return torch.ones_like(tensor)
        made = tensor.detach().clone()
        for _, part in parts_of(made):
            if part.is_floating_point() or part.is_complex():
                part.fill_(1)
        return made


def argument_names(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names of the parameters."""
    signature = signature_of(fn)
    with contextlib.suppress(TypeError):  # a decorator may pass further arguments to its function
        if signature is not None:
            return dict(signature.bind(*args, **kwargs).arguments)
    return {f"argument {number}": value for number, value in enumerate(args)} | kwargs


# -------------------------------------------------------------------------------------------------- outcomes


def record_outcome(
    result: Any, arguments: Mapping[str, Any], state: Mapping[str, Tensor], before: Mapping[str, list[Tensor]]
) -> Outcome:
    """Records a call that has ended.

    Args:
        result: The result of the call.
        arguments: Its arguments, by name.
        state: Tensors that it may have changed, by name.
        before: Copies of the plain tensors of the state, from before the first call. A tensor that is still equal is
            left out. A tensor that has joined the state since, such as a cache, is recorded.
    """
    results = dict(leaves_of(result, "result"))
    given = {path: leaf for name, value in arguments.items() for path, leaf in leaves_of(value, name)}
    changed = {name: tensor for name, tensor in state.items() if not _is_equal(tensor, before.get(name, []))}
    others = {**given, **state}
    tensors = {path: leaf for path, leaf in others.items() if isinstance(leaf, Tensor)}
    return {
        "container": _containers(result),
        "entries": {
            **{path: describe(leaf) for path, leaf in results.items()},
            **{f"{path} after the call": describe(leaf) for path, leaf in (given | changed).items()},
            **{
                f"the gradient of {path}": describe(leaf.grad)
                for path, leaf in tensors.items()
                if leaf.is_leaf and leaf.requires_grad
            },
        },
        "memory": dict(shared_memory({**others, **results})),
        "same": dict(_same_objects(results, others)),
    }


def copy_parts(state: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Copies the plain tensors of the state."""
    return {name: [part.detach().clone() for _, part in parts_of(t)] for name, t in state.items()}


def _is_equal(tensor: Tensor, copies: list[Tensor]) -> bool:
    tensors = [part.detach() for _, part in parts_of(tensor)]
    return len(tensors) == len(copies) and all(
        part.shape == copied.shape and torch.equal(part, copied)
        for part, copied in zip(tensors, copies, strict=True)
    )


def describe(leaf: Any) -> Entry:
    """Records a leaf; an object that is neither a tensor nor a constant has its type alone.

    A Python float is recorded as a tensor of float32, since it usually comes from one.
    """
    if isinstance(leaf, Tensor):
        return _describe_tensor(leaf)
    if isinstance(leaf, float):
        return {"kind": "float", "parts": {"": torch.tensor(leaf, dtype=torch.float32)}}
    if leaf is None or isinstance(leaf, bool | int | complex | str):
        return {"kind": type(leaf).__name__, "value": leaf}
    return {"kind": _class_name(type(leaf))}


def _describe_tensor(tensor: Tensor) -> Entry:
    entry: Entry = {
        "kind": _class_name(type(tensor)),
        "size": list(map(int, tensor.shape)),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "layout": str(tensor.layout).removeprefix("torch."),
        "device": tensor.device.type,
        "requires_grad": tensor.requires_grad,
        "parts": {path: _copy(part) for path, part in parts_of(tensor)},
    }
    if is_wrapper(tensor):
        entry["metadata"] = _ADDRESS.sub("", repr(take_apart(tensor)[1]))
        entry["dynamic"] = {name: int(getattr(tensor, name)) for name in dynamic_names(type(tensor))}
    return entry


def _copy(part: Tensor) -> Tensor:
    """Copies a plain tensor to the CPU as a dense one of its own storage."""
    with torch.no_grad():
        dense = part.detach()
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        return dense.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()


def _class_name(cls: type) -> str:
    return cls.__name__ if cls.__module__ in ("builtins", "torch") else f"{cls.__module__}.{cls.__qualname__}"


def _containers(value: Any) -> str:
    """Returns the types of nested containers, without the leaves."""
    if not isinstance(value, Mapping | tuple | list):
        return "."
    inside = map(_containers, value.values() if isinstance(value, Mapping) else value)
    return f"{type(value).__name__}({', '.join(inside)})"


# --------------------------------------------------------------------------------------------------- aliasing


def shared_memory(leaves: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (path, path) of each plain tensor and the first one before it that has the same storage."""
    first: dict[int, str] = {}
    for path, leaf in leaves.items():
        for inner, part in parts_of(leaf) if isinstance(leaf, Tensor) else ():
            if part.layout is torch.strided and (address := part.untyped_storage().data_ptr()):
                other = first.setdefault(address, path + inner)
                if other != path + inner:
                    yield path + inner, other


def _same_objects(results: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (path, path) of each result that is an argument, a part of the state or an earlier result itself."""
    known = {id(leaf): path for path, leaf in reversed(list(others.items())) if isinstance(leaf, Tensor)}
    for path, leaf in results.items():
        if isinstance(leaf, Tensor):
            other = known.setdefault(id(leaf), path)
            if other != path:
                yield path, other
