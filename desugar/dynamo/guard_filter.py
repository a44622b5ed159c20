"""Removes Dynamo guards that other guards imply. Each removal has its reason in this module; all other guards stay.

Dynamo's guards on a wrapper call `__tensor_flatten__` twice per call, in Python: once for the names of the inner
tensors, once for the metadata. For some classes the type determines both, and another guard checks the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from desugar import _torch as private
from desugar.ir.values import is_wrapper
from subclasses import TensorSubclass
from subclasses.adoption.contexts import guards_names
from subclasses.adoption.flatten_purity import flattens_to_constants

# Dynamo's options for the functions that `desugar.compile` compiles.
_DYNAMO_OPTIONS = {
    "record_runtime_overhead": False,  # otherwise Dynamo's code measures itself, which costs 1.5 µs a call
    "skip_nnmodule_hook_guards": False,  # guards notice hooks that are added to a module later
    "use_lamba_guard_for_object_aliasing": False,  # that two arguments are one object is compared in C++
}
_NAMES = ".__tensor_flatten__()[0]"  # Dynamo's suffix for a wrapper's list of inner tensor names


def dynamo_context(backend: Any, fullgraph: bool, dynamic: bool | None) -> Any:
    """Returns Dynamo's context, which compiles a function with a backend and with this guard filter."""
    context = private.optimize(backend, nopython=fullgraph, dynamic=dynamic, guard_filter_fn=keep_guards)
    options = {name: value for name, value in _DYNAMO_OPTIONS.items() if hasattr(private.dynamo_config, name)}
    context.enter_exit_hooks.append(private.dynamo_config._make_closure_patcher(**options))
    return context


def keep_guards(entries: Sequence[Any]) -> list[bool]:
    """Returns, for each guard of a compilation, whether Dynamo checks it (Dynamo's `guard_filter_fn`)."""
    for entry in entries:
        # Dynamo builds the remaining guards a second time. A property then returns another tensor, and Dynamo would
        # compare the two.
        entry.orig_guard.obj_weakref = None
    wrappers = {entry.name: entry.value for entry in entries if entry.has_value and is_wrapper(entry.value)}
    return [not is_proved(entry, wrappers) for entry in entries]


def is_proved(entry: Any, wrappers: dict[str, Tensor]) -> bool:
    """Returns whether other guards on the same wrapper imply a guard.

    Args:
        entry: The guard.
        wrappers: Dynamo's name -> tensor subclass instance.
    """
    if entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH" and entry.name in wrappers:
        return has_fixed_metadata(wrappers[entry.name])
    if entry.guard_type == "EQUALS_MATCH" and entry.name.endswith(_NAMES):
        owner = wrappers.get(entry.name.removesuffix(_NAMES))
        return owner is not None and has_fixed_names(owner)
    return False


def has_fixed_metadata(wrapper: Tensor) -> bool:
    """Returns whether all instances of a wrapper's type have the same metadata; TYPE_MATCH guards the type.

    The metadata of a declared class is its layout: the static fields, which optional inner tensors are present, and
    the layouts of inner wrappers. So it is fixed for a class without static fields, without optional fields and without
    marked cotangents, where no inner tensor is a wrapper. The metadata of a handwritten class is fixed if the bytecode
    of `__tensor_flatten__` only builds constants.
    """
    cls: Any = type(wrapper)
    if not is_generated(cls):
        return flattens_to_constants(cls)
    spec, layout = cls.__spec__, wrapper._layout  # type: ignore[attr-defined]
    has_no_choice = not spec.statics and not any(field.optional for field in spec.inners)
    return (
        has_no_choice
        and not cls._marks_cotangents
        and not any(is_wrapper(getattr(wrapper, name)) for name in layout.present)
    )


def has_fixed_names(wrapper: Tensor) -> bool:
    """Returns whether the names of the inner tensors follow from the type and the metadata, which have other guards.

    The layout of a declared class, which is its metadata, holds the names. So does the metadata of an adopted class
    that is interned. The names of a handwritten class are fixed if the bytecode of `__tensor_flatten__` only builds
    constants.
    """
    cls: Any = type(wrapper)
    return is_generated(cls) or flattens_to_constants(cls) or guards_names(wrapper)


def is_generated(cls: type) -> bool:
    """Returns whether a class is a declared one with generated `__tensor_flatten__` and `__metadata_guard__`."""
    hooks = (getattr(cls, name, None) for name in ("__tensor_flatten__", "__metadata_guard__"))
    return issubclass(cls, TensorSubclass) and all(hasattr(hook, "__source__") for hook in hooks)
