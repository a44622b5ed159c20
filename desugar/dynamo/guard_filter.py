"""Which of Dynamo's guards prove nothing that another one does not: each has its reason here, and all others stay.

Dynamo asks `__tensor_flatten__` of each wrapper twice a call, in Python: for the names of the inner tensors, and for
the metadata. For some classes both are settled by the type, which another guard looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from desugar.ir.handwritten_classes import flattens_to_constants
from desugar.ir.values import is_wrapper
from subclasses import TensorSubclass

_NAMES = ".__tensor_flatten__()[0]"  # how Dynamo names the list of inner tensors of what stands before


def keep_guards(entries: Sequence[Any]) -> list[bool]:
    """Per guard of a compilation, whether it is checked (`guard_filter_fn` of Dynamo)."""
    for entry in entries:
        # Dynamo makes the guards that stay anew, of other tensors where it reads properties, and would compare them.
        entry.orig_guard.obj_weakref = None
    wrappers = {entry.name: entry.value for entry in entries if entry.has_value and is_wrapper(entry.value)}
    return [not is_proved(entry, wrappers) for entry in entries]


def is_proved(entry: Any, wrappers: dict[str, Tensor]) -> bool:
    """Whether other guards of the same wrapper prove what a guard asks.

    Args:
        entry: The guard.
        wrappers: Tensor subclasses by Dynamo's names.
    """
    if entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH" and entry.name in wrappers:
        return has_fixed_metadata(wrappers[entry.name])
    if entry.guard_type == "EQUALS_MATCH" and entry.name.endswith(_NAMES):
        owner = wrappers.get(entry.name.removesuffix(_NAMES))
        return owner is not None and has_fixed_names(owner)
    return False


def has_fixed_metadata(wrapper: Tensor) -> bool:
    """Whether all wrappers of a type have the same metadata; the type itself has a guard (TYPE_MATCH).

    Of a declared class the metadata is its layout: static fields, which optional inner tensors are there, and the
    layouts of wrappers inside, whose types and metadata have guards of their own. So it is settled where there are no
    static and no optional fields, and no cotangents are marked. A class written by hand gives constants if its
    bytecode can do nothing else.
    """
    cls: Any = type(wrapper)
    if not is_generated(cls):
        return flattens_to_constants(cls)
    spec, layout = cls.__spec__, wrapper._layout  # type: ignore[attr-defined]
    is_settled = not spec.statics and not any(field.optional for field in spec.inners)
    return (
        is_settled
        and not cls._marks_cotangents
        and not any(is_wrapper(getattr(wrapper, name)) for name in layout.present)
    )


def has_fixed_names(wrapper: Tensor) -> bool:
    """Whether the inner tensors' names follow from the type and the metadata, which have guards of their own.

    Of a declared class they stand in the layout, which is the metadata. A class written by hand gives constants if its
    bytecode can do nothing else.
    """
    cls = type(wrapper)
    return is_generated(cls) or flattens_to_constants(cls)


def is_generated(cls: type) -> bool:
    """Whether a class is a declared one whose author has not written these hooks."""
    hooks = (getattr(cls, name, None) for name in ("__tensor_flatten__", "__metadata_guard__"))
    return issubclass(cls, TensorSubclass) and all(hasattr(hook, "__source__") for hook in hooks)
