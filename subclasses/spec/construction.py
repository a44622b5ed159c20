"""Checks of a construction, and small helpers that generated methods call.

Generated code tests a condition inline and calls a ``raise_`` function only if it fails, so a valid construction pays
for the test alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from subclasses._torch import DisableTorchFunctionSubclass, in_function_mode, is_transformed
from subclasses.errors import DispatchError, coded, one_of
from subclasses.spec.fields import MISSING
from subclasses.spec.statics import describe
from subclasses.spec.values import known_to_differ


def raise_not_a_tensor(cls: str, field: str, expected: type, got: object) -> NoReturn:
    """Raises TypeError: the value of an inner tensor field is not a tensor of the expected class."""
    raise TypeError(f"{cls}.{field}: expected a {expected.__name__}, got {describe(got)}")


def raise_metadata_by_position(
    cls: str, inners: Sequence[str], metadata: Sequence[str], more: Sequence[object]
) -> NoReturn:
    """Raises TypeError: there are more positional arguments than inner tensors; metadata is passed by keyword."""
    inner = f"{len(inners)} inner tensor{'s' * (len(inners) > 1)} by position ({', '.join(inners)})"
    given = [
        f"{name}={value!r}"
        for name, value in zip(metadata, more, strict=False)
        if not isinstance(value, Tensor)
    ]
    if given and len(more) <= len(metadata):
        hint = f"pass it by keyword: {', '.join(given)}"
    else:
        hint = f"and by keyword {', '.join(metadata)}"
    raise TypeError(f"{cls} takes {inner}, got {len(inners) + len(more)}; {hint}")


def raise_missing_metadata(cls: str, given: dict[str, object]) -> NoReturn:
    """Raises TypeError: metadata without a default is missing. The parameters have one, so that this runs."""
    names = [name for name, value in given.items() if value is MISSING]
    shown = " and ".join(map(repr, names))
    raise TypeError(
        f"{cls} is missing metadata without a default, {shown}; pass it by keyword: "
        f"{', '.join(f'{name}=...' for name in names)}"
    )


def raise_no_conversion(cls: str, now: torch.dtype, dtype: torch.dtype) -> NoReturn:
    """Raises TypeError: a value would become a plain tensor of another dtype, as in ``Module.half()``."""
    if now.is_complex and not dtype.is_complex:
        raise TypeError(
            f"{cls}.data: expected a {cls}, got a plain tensor of {dtype}. If this is Module.to or Module.half: {cls} "
            f"is {now}, and {dtype} has no imaginary part, so the conversion materialized it. Add a rule with "
            f"@{cls}.implements(torch.ops.aten._to_copy.default) that keeps a complex dtype. "
            f"Or convert the other parameters one by one"
        )
    raise TypeError(
        f"{cls}.data: expected a {cls}, got a plain tensor of {dtype}. If this is Module.to or Module.half: {cls} does "
        f"not convert from {now} to {dtype}, because no inner tensor of the outer dtype is free to change, so the "
        f"conversion materialized it. Let dtype_from= or `outer` follow an inner tensor declared without dtype=, or "
        f"add a rule with @{cls}.implements(torch.ops.aten._to_copy.default)"
    )


def raise_not_an_outer(cls: str, got: object) -> NoReturn:
    """Raises TypeError: ``outer`` did not return an Outer."""
    shown = describe(got)
    raise TypeError(f"{cls}.outer: expected an Outer, as in `return Outer(size=(...))`, got {shown}")


def raise_failed_outer(cls: str, error: RuntimeError) -> NoReturn:
    """Raises the error of ``outer``, or DispatchError if ``outer`` read the contents of a tensor in a trace."""
    try:
        if type(error).__name__ not in _DATA_DEPENDENT:
            raise error
        raise DispatchError(
            f"{cls}.outer reads the data of an inner tensor, as int(t.max()) does, which no compiler has ({error}): "
            "compute the size from sizes and metadata",
            code="outer-reads-data",
            hint="Declare a size that depends on data as a field, `length: int = dynamic()`, and pass it to the "
            "constructor",
        ) from error
    finally:
        del error  # its traceback holds this frame


# Errors of torch.fx and of fake tensors, by name: a release has them in one module or in another.
_DATA_DEPENDENT = frozenset({"DataDependentOutputException", "GuardOnDataDependentSymNode"})


def raise_bad_outer(cls: str, outer: object, error: Exception) -> NoReturn:
    """Raises ValueError: ``outer`` returned an Outer that describes no tensor; reraises an error of a trace."""
    try:
        if type(error) not in (TypeError, RuntimeError):
            raise error
        size, text = getattr(outer, "size", ()), str(error).splitlines()[0]
        if not isinstance(size, tuple | list):
            text = f"expected a tuple of ints as the size, such as ({size!r},)"
        elif any(type(n) is int and n < 0 for n in size):
            text = "a size is negative"
        raise ValueError(f"{cls}.outer: no tensor has what it returned, {outer}: {text}") from error
    finally:
        del error  # its traceback holds this frame


def check_materialized(x: Any, plain: Any) -> None:
    """Raises ValueError unless ``materialize`` returned another tensor, with the value's size and dtype.

    Under autocast the ops of ``materialize`` may return another dtype.
    """
    with DisableTorchFunctionSubclass():  # reading the size of a value would dispatch to its class
        if (
            plain.__class__ is Tensor
            and plain.dtype is x.dtype
            and plain.shape == x.shape
            and plain.device == x.device
        ):
            return
    if not isinstance(plain, Tensor):
        got = f"{plain!r} of type {type(plain).__name__}"
    elif plain is x or (type(plain) is type(x) and not x._layout.nested):
        raise coded(
            ValueError,
            f"{type(x).__name__}.materialize: expected a plain tensor, on which ops without a rule run, "
            f"got a {type(x).__name__} again",
            code="materialize-result",
            hint=f"compute it from the inner tensors, as in self.{x._layout.present[0]}",
        )
    elif known_to_differ(plain.shape, x.shape) or not (
        plain.dtype == x.dtype or _is_autocasting(plain.device.type)
    ):
        got = f"one of size {tuple(plain.shape)} and {plain.dtype}"
    elif plain.device != x.device:
        raise coded(
            ValueError,
            f"{type(x).__name__}.materialize: expected a tensor on {x.device}, where the value is, got one on "
            f"{plain.device}",
            code="materialize-result",
            hint="make what it computes with there, as in torch.arange(n, device=self.device)",
        )
    else:
        return
    raise coded(
        ValueError,
        f"{type(x).__name__}.materialize: expected a tensor of the outer size {tuple(x.shape)} and {x.dtype}, got "
        f"{got}",
        code="materialize-result",
        hint="correct it, or declare with size_from=, dtype_from= or `outer` what the value shows. Where other values "
        "pass, a rule made this one with inner tensors that do not go together, as a slice of one of them alone",
    )


def _is_autocasting(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def raise_wrong_dtype(cls: str, field: str, expected: torch.dtype, got: torch.dtype) -> NoReturn:
    """Raises ValueError: an inner tensor does not have the dtype that its field declares."""
    raise ValueError(f"{cls}.{field}: expected dtype {expected}, got {got}")


def raise_mixed_devices(cls: str, field: str, got: Any, anchor: str, expected: Any) -> NoReturn:
    """Raises ValueError: two inner tensors are on different devices."""
    raise ValueError(
        f"{cls}.{field}: expected device {expected} as of {anchor!r}, got {got}; "
        f"declare it inner(device='any') if it may live elsewhere"
    )


def raise_not_a_count(cls: str, field: str, got: object) -> NoReturn:
    """Raises for an invalid dynamic int: ValueError if it is negative, TypeError if it is not an int."""
    shown = f"{got}" if isinstance(got, int) and not isinstance(got, bool) else describe(got)
    error = ValueError if isinstance(got, int) and not isinstance(got, bool) else TypeError
    raise error(f"{cls}.{field}: expected a non-negative int, got {shown}")


def check_not_transformed(cls: str, *inners: Tensor | None) -> None:
    """Raises DispatchError if a torch.func transform wrapped an inner tensor."""
    if any(t is not None and is_transformed(t) for t in inners):
        raise DispatchError(
            f"{cls}: cannot be made inside a transform of torch.func (vmap, grad, jvp, ...) from tensors that it "
            "transforms, since an op on it would reach them after the transform was left",
            code="transform-refused",
            hint="make it outside and pass what is inside as plain tensors, or use torch.autograd.grad or a batch "
            "dimension",
        )


# ---- constructors of a class body --------------------------------------------------------------------------


def checked_new(author: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the ``__new__`` of a class body: it must return a value that the generated constructor made."""

    @functools.wraps(author)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = author(cls, *args, **kwargs)
        # Dynamo does not read the __dict__ of a value where it resumes after a graph break in the author's code.
        if made.__class__ is not cls or not (
            torch.compiler.is_dynamo_compiling() or "_layout" in made.__dict__
        ):
            _check_made(cls, made)
        return made

    return __new__


def check_class(cls: object) -> None:
    """Raises TypeError if ``__new__`` was called without the class."""
    if not isinstance(cls, type):
        raise TypeError(
            f"__new__: expected the class first, got {describe(cls)}; write `super().__new__(cls, ...)` with the inner "
            f"tensors after it"
        )


def serving_new(base: Any, made: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the generated ``__new__`` of a class, for a subclass that calls it with ``super()`` and its own fields."""

    @functools.wraps(made)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        check_class(cls)
        return made(cls, *args, **kwargs) if cls is base else cls._new(cls, *args, **kwargs)

    return __new__


def _check_made(cls: Any, made: Any) -> None:
    is_made = isinstance(made, cls)
    if (is_made and "_layout" in made.__dict__) or in_function_mode():  # a mode may return any object
        return
    fields = ", ".join(cls.__spec__.inner_names)
    hint = f"end it with `return super().__new__(cls, {fields})`"
    if is_made:
        raise TypeError(
            f"{cls.__name__}.__new__ returned {one_of(cls)} without fields, which the generated constructor did not "
            f"make (Tensor.__new__ and Tensor._make_subclass know no inner tensors); {hint}"
        )
    raise TypeError(f"{cls.__name__}.__new__ returned {describe(made)}, expected {one_of(cls)}; {hint}")


def checked_init(author: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the ``__init__`` of a class body, which may pass arguments that only ``__new__`` takes."""

    @functools.wraps(author)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            author(self, *args, **kwargs)
        except TypeError as error:
            if not str(error).startswith("object.__init__() takes exactly one argument"):
                raise
            name, fields = type(self).__name__, ", ".join(type(self).__spec__.inner_names)
            raise TypeError(
                f"{name}.__init__: super().__init__() takes no arguments, since __new__ has set the fields; write "
                f"`super().__init__()`, or in place of __init__ a __new__ that ends with `return super().__new__(cls, "
                f"{fields})`"
            ) from error

    return __init__


# ---- printing ----------------------------------------------------------------------------------------------


def repr_tail(x: Tensor) -> str:
    """Returns the end of a repr: ``grad_fn`` or ``requires_grad``, as for a plain tensor."""
    if x.grad_fn is not None:
        return f", grad_fn=<{type(x.grad_fn).__name__}>"
    return ", requires_grad=True" if x.requires_grad else ""
