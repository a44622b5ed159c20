"""Files of plain tensors, such as safetensors, for values of every declared class.

``torch.save`` and ``load_state_dict`` take values as they are. :func:`save_file` and :func:`load_file` write and read a
state dict like the functions of these names in ``safetensors.torch``. For other formats, :func:`to_plain` flattens a
state dict into plain tensors and metadata of strings, from which :func:`from_plain` rebuilds it. Inner tensors are
named by their fields, as ``0.weight.qdata`` and ``0.weight.scale``; a declared class inside of another adds its own
names.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses.base import TensorSubclass, descendants
from subclasses.errors import full_name, one_of
from subclasses.serialize import rebuild, reduce

VALUES_KEY, TIED_KEY = "declared_values", "tied_tensors"
_plain: Any = Tensor
_dispatch_of_plain = _plain.__torch_dispatch__

__all__ = ["from_plain", "load_file", "save_file", "to_plain"]

# ---- to plain tensors --------------------------------------------------------------------------------------


def save_file(tensors: Mapping[str, Any], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a state dict to a safetensors file.

    Args:
        tensors: plain tensors, Parameters and values of declared classes, by name.
        filename: the path of the file.
        metadata: strings to write beside the description of the values.

    Raises:
        TypeError, ValueError: see :func:`to_plain`.
    """
    from safetensors.torch import save_file as save_plain

    plain, described = to_plain(tensors)
    save_plain(plain, filename, {**(metadata or {}), **described})


def to_plain(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Flattens each value of a declared class to its inner tensors, under ``name.field``.

    A tensor under several names in the state, such as a tied weight, is stored once: safetensors refuses shared memory.
    Attributes that a user set on a value, and whether a tensor requires grad, are not stored.

    Returns:
        The tensors, contiguous, and metadata of strings, which :func:`from_plain` needs.

    Raises:
        TypeError: an entry is not a tensor, of a class that is not declared, or has metadata that JSON does not hold.
        ValueError: two tensors would have the same name.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        description, parts = _flatten(name, value)
        if description is not None:
            described[name] = description
        taken = parts.keys() & (tensors.keys() | (state.keys() - {name}))
        if taken:
            raise ValueError(f"to_plain: there is a tensor named {min(taken)} already")
        tensors |= parts
    tied = _find_tied(tensors)
    stored = {key: t.contiguous() for key, t in tensors.items() if key not in tied}
    return stored, {VALUES_KEY: json.dumps(described), TIED_KEY: json.dumps(tied)}


def _flatten(name: str, value: Any) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Returns the description of a value, or None for a plain tensor, and its plain tensors by name."""
    if not isinstance(value, Tensor):
        raise TypeError(f"to_plain: expected a tensor under {name}, got {value!r:.200}")
    if isinstance(value, TensorSubclass):
        _, (cls, inners, metadata, flags, _) = reduce(value)
        if flags["cotangent"]:
            raise TypeError(f"to_plain: {name} is a gradient of {one_of(cls)}, which only torch.save writes")
        tensors: dict[str, Tensor] = {}
        nested: dict[str, Any] = {}
        for field, t in inners.items():
            inside, parts = _flatten(f"{name}.{field}", t)
            tensors |= parts
            nested |= {} if inside is None else {field: inside}
        encoded = {key: _encode(f"{name}.{key}", entry) for key, entry in metadata.items()}
        return {"class": full_name(cls), "metadata": encoded, "nested": nested}, tensors
    cls: Any = type(value)
    if cls.__torch_dispatch__ is not _dispatch_of_plain:
        raise TypeError(
            f"to_plain: {name} is {one_of(cls)}, which is not declared with TensorSubclass: convert it to a "
            "plain tensor or a declared class first, or use torch.save"
        )
    return None, {name: value.detach()}


def _encode(name: str, entry: Any) -> Any:
    """Returns metadata as JSON holds it: numbers and text as they are, other types by the name of their kind."""
    if entry is None or type(entry) in (bool, int, float, str):
        return entry
    if isinstance(entry, torch.dtype):
        return {"dtype": str(entry).removeprefix("torch.")}
    if isinstance(entry, enum.Enum):
        return {"enum": entry.name}
    if type(entry) is tuple:
        return {"tuple": [_encode(name, part) for part in entry]}
    raise TypeError(
        f"to_plain: {name} is {entry!r:.200}, and a file holds metadata of None, numbers, text, dtypes, enums and "
        "tuples of them; use torch.save"
    )


def _find_tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps the name of each repeated tensor to its first name."""
    first: dict[Any, str] = {}
    tied = {}
    for name, t in tensors.items():
        if t.is_meta or not t.numel():
            continue
        memory = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride())
        if first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied


# ---- from plain tensors ------------------------------------------------------------------------------------


def load_file(filename: Any, device: str | int = "cpu") -> dict[str, Any]:
    """Reads the state dict that :func:`save_file` wrote, or any safetensors file of plain tensors.

    Args:
        filename: the path of the file.
        device: the device of the tensors.

    Raises:
        TypeError, ValueError: see :func:`from_plain`.
    """
    from safetensors.torch import load_file as load_plain

    tensors, metadata = load_plain(filename, device), _read_metadata(filename)
    return from_plain(tensors, metadata) if VALUES_KEY in metadata else dict(tensors)


def from_plain(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Rebuilds the state dict that :func:`to_plain` flattened.

    A file is not believed. It names classes, which have to be declared in this process, and no module is imported. The
    checks of ``torch.load`` apply to each value: names, types, and all that the constructor of its class refuses.

    Raises:
        TypeError: a field of a value is of another type than its class allows.
        ValueError: the metadata is not from :func:`to_plain`, a class is not declared, or a value is refused.
    """
    if metadata is None or VALUES_KEY not in metadata:
        raise ValueError(
            f"from_plain: expected metadata with {VALUES_KEY!r}, as to_plain returns it beside the tensors; "
            f"safetensors.safe_open(path, 'pt').metadata() reads it"
        )
    state: dict[str, Any] = dict(tensors)
    for name, first in _read_json(metadata, TIED_KEY).items():
        if name in tensors:
            raise ValueError(
                f"from_plain: expected tied names of tensors that the file leaves out, got {name!r}"
            )
        if first in tensors:
            state[name] = tensors[first]
    described, names = _read_json(metadata, VALUES_KEY), list(state)
    for name, description in described.items():
        if name in state:
            raise ValueError(f"from_plain: {name} is a plain tensor in the file, and described as a value")
        state[name] = _build(name, description, state)
    owners = (name if name in state else _owner(name, described) for name in names)
    return {name: state[name] for name in dict.fromkeys(owners)}


def _read_json(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    try:
        content = json.loads(metadata.get(key, "{}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"from_plain: {key} is not JSON text: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"from_plain: expected names in {key}, got {content!r:.200}")
    return content


def _build(name: str, description: Any, state: dict[str, Any]) -> Any:
    """Returns a described value, whose tensors are taken out of the state."""
    keys = {"class", "metadata", "nested"}
    known = isinstance(description, dict) and description.keys() == keys
    if not known or not all(isinstance(description[key], dict) for key in ("metadata", "nested")):
        raise ValueError(f"from_plain: expected {name} described by {sorted(keys)}, got {description!r:.200}")
    cls = _find_class(name, description["class"])
    inners = {
        field: _build(f"{name}.{field}", inside, state) for field, inside in description["nested"].items()
    }
    for field in cls.__spec__.inners:
        if (t := state.pop(f"{name}.{field.name}", None)) is not None:
            inners[field.name] = t
        elif field.name not in inners and not field.optional:
            raise ValueError(f"from_plain: {name}.{field.name} is missing")
    choices = {field.name: field.choices for field in cls.__spec__.statics}
    try:
        metadata = {key: _decode(key, e, choices.get(key, ())) for key, e in description["metadata"].items()}
        return rebuild(cls, inners, metadata, {"requires_grad": False, "cotangent": False}, {})
    except (TypeError, ValueError) as error:
        raise type(error)(f"from_plain: {name}: {error}") from error


def _find_class(name: str, wanted: Any) -> Any:
    """Returns the class that was declared last under a name."""
    for cls in reversed(descendants(TensorSubclass)):
        if full_name(cls) == wanted and not cls._is_cotangent:  # type: ignore[attr-defined]
            return cls
    raise ValueError(
        f"from_plain: {name} is of the class {wanted!r:.200}, which is not declared in this process: import the module "
        "that declares it first"
    )


def _decode(key: str, entry: Any, choices: Sequence[Any]) -> Any:
    """Returns metadata that :func:`_encode` wrote; the constructor of the class checks it."""
    match entry:
        case {"dtype": str(name)} if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        case {"enum": name} if members := [c for c in choices if isinstance(c, enum.Enum) and c.name == name]:
            return members[0]
        case {"tuple": list(parts)}:
            return tuple(_decode(key, part, choices) for part in parts)
        case dict() | list():
            raise ValueError(f"expected a dtype, an enum or a tuple as {key}, got {entry!r:.200}")
    return entry


# ---- several files of one model ----------------------------------------------------------------------------


def read_metadata(files: Iterable[Any]) -> dict[str, str]:
    """Returns the metadata of the safetensors files among ``files``, each of which describes the whole model."""
    metadata: dict[str, str] = {}
    for path in files:
        metadata |= _read_metadata(path) if str(path).endswith(".safetensors") else {}
    return metadata


def _read_metadata(path: Any) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def tied_names(metadata: Mapping[str, str]) -> dict[str, str]:
    """Maps the name of each tensor that shares its memory with an earlier tensor to the earlier tensor's name."""
    described = _read_json(metadata, VALUES_KEY)
    tied = _read_json(metadata, TIED_KEY)
    return {_owner(name, described): _owner(first, described) for name, first in tied.items()}


def _owner(name: str, described: Mapping[str, Any]) -> str:
    """Returns the name of the value that an inner tensor belongs to; a plain tensor's own name."""
    owner = name
    while owner and owner not in described:
        owner = owner.rpartition(".")[0]
    return owner or name
