"""Differentiable construction of a wrapper, and differentiable access to its inner tensors.

A wrapper stores inner tensors that do not require grad. Two autograd functions connect the wrapper with inner tensors
in the autograd graph::

    inner tensors --Construct--> wrapper --Unwrap--> inner tensors

A third one, :class:`Operand`, converts the plain gradients of ops with PyTorch's formulas.

An *open wrapper* is the exception: it stores inner tensors that may require grad, and does not require grad itself.
Autograd records code that reads its inner tensors raw, such as ``materialize``.

A cotangent that reaches a wrapper may have the wrapper's class, the same metadata and the same non-differentiable inner
tensors. It may also be a plain tensor of the outer size, as C++ formulas produce. The class converts a plain cotangent
with :meth:`TensorSubclass.wrap_cotangent`. A class with ``fallback="map"`` and without this method passes a plain
cotangent to each inner tensor. Its mapped ops use a plain operand in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import any_requires_grad, apply_function, is_recording, skip_frames
from subclasses._torch_capture import is_exporting
from subclasses._torch_tracing import is_graph_argument, leave_in_graph, without_lazy_bits
from subclasses.autograd import gradient_errors as errors
from subclasses.autograd.calling import in_rule
from subclasses.errors import DispatchError, one_of
from subclasses.layout import BY_FORMULA, RAW, READS, Layout, are_alike, cotangent_layout, with_nested
from subclasses.spec.values import (
    PLAIN,
    dynamic_ints,
    inner_tensors,
    is_declared,
    is_differentiable,
    known_to_differ,
    with_inners,
)

aten = torch.ops.aten


def construct(layout: Layout, dynamics: tuple[Any, ...], *inners: Tensor | None) -> Any:
    """Constructs a wrapper as a differentiable function of its inner tensors."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inners):
        return construct_recorded(layout, dynamics, *inners)
    return wrap_detached(layout, dynamics, *inners)


def construct_recorded(layout: Layout, dynamics: tuple[Any, ...], *inners: Tensor | None) -> Any:
    """Constructs a wrapper from inner tensors, at least one of which requires grad, in grad mode."""
    if (layout.cls._runs_above and in_rule()) or is_exporting():  # type: ignore[attr-defined]
        return layout.cls._wrap(layout, *inners, *dynamics)  # type: ignore[attr-defined]
    made = apply_function(Construct, layout, dynamics, None, *inners)
    if not (torch.compiler.is_dynamo_compiling() or any_requires_grad(made)):
        raise errors.integer_value_error(layout.cls, made.dtype, inners)
    return made


def wrap_detached(layout: Layout, dynamics: tuple[Any, ...], *inners: Tensor | None) -> Any:
    """Constructs a wrapper from detached inner tensors."""
    raw = [t.detach() if t is not None and t.requires_grad else t for t in inners]
    return layout.cls._wrap(layout, *raw, *dynamics)  # type: ignore[attr-defined]


def _detached(t: Tensor) -> Tensor:
    """Returns a tensor detached; for a plain tensor a view, which records the grad mode in which it was made."""
    return t.detach()[...] if t.__class__ is Tensor or not hasattr(type(t), "__spec__") else t.detach()


class Construct(torch.autograd.Function):
    """``Cls(*inners)`` in the autograd graph; the backward returns the inner tensors of the cotangent.

    A copy of a representation also names the value that is copied, as ``source``. A plain cotangent of the copy goes
    to the source, by PyTorch's formula for copies, so the copy saves no inner tensors.
    """

    jvp = staticmethod(errors.refuse_forward_mode)

    @staticmethod
    def forward(layout: Layout, dynamics: tuple[Any, ...], source: Any, *inners: Tensor | None) -> Any:
        """Wraps inner tensors. Each one that requires grad is detached, since stored tensors do not require grad.

        Each detached tensor is stored as a view made under no_grad. PyTorch then raises if a user writes a tensor that
        requires grad to it where gradients are recorded. Without this the write would succeed, and a second value made
        from the stored tensor would have wrong gradients. All other inner tensors stay the same objects: two values
        that share one offsets tensor provably have matching rows.
        """
        detached = [_detached(t) if t is not None and t.requires_grad else t for t in inners]
        return layout.cls._wrap(layout, *detached, *dynamics)  # type: ignore[attr-defined]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the inner tensors only if a plain cotangent may need them."""
        ctx.layout, ctx.dynamics, source, *inners = inputs
        # As `is_differentiable`, which is called for each inner tensor of each value that an op makes.
        ctx.sizes = [
            t.shape if t is not None and (t.is_floating_point() or t.is_complex()) else None for t in inners
        ]
        ctx.set_materialize_grads(False)
        cls = ctx.layout.cls
        ctx.source_device = None if source is None else source.device
        if not cls._traits.pulls_back or source is not None:
            return
        ctx.likes = None
        if not cls.__spec__.has_materialize:
            # Without `materialize`, pulling back does not use the contents of differentiable inner tensors.
            ctx.likes = [None if size is None else Like(t) for t, size in zip(inners, ctx.sizes, strict=True)]
            inners = [t if size is None else None for t, size in zip(inners, ctx.sizes, strict=True)]
        ctx.save_for_backward(*inners)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> tuple[Any, ...]:
        """Returns the inner tensors of the cotangent; a plain cotangent is converted to the class first.

        Raises:
            DispatchError: the cotangent is plain and the class cannot convert it.
        """
        cls = ctx.layout.cls
        if cotangent is None:
            return None, None, None, *(None for _ in ctx.sizes)
        cotangent = as_gradient(cls._value_cls, cotangent)
        if isinstance(cotangent, cls._value_cls):
            grads = cotangent.unwrap()
        elif ctx.source_device is not None:  # the engine converts the dtype
            return None, None, cotangent.to(ctx.source_device), *(None for _ in ctx.sizes)
        elif cls._traits.is_mapped and not cls._traits.pulls_back:  # as a mapped op treats a plain operand
            grads = [cotangent for _ in ctx.sizes]
        elif cls._traits.pulls_back:
            # An open wrapper: its inner tensors may require grad, which a double backward needs.
            inners = ctx.saved_tensors
            if ctx.likes is not None:  # NaN shows where an author's method reads the contents
                inners = [
                    t if like is None else like.filled(torch.nan)
                    for t, like in zip(inners, ctx.likes, strict=True)
                ]
            primal = cls._wrap(ctx.layout, *inners, *ctx.dynamics)
            grads = wrap_cotangent(primal, cotangent, ctx.needs_input_grad[3:]).unwrap()
        else:
            raise errors.cotangent_error(cls, cotangent)
        return None, None, None, *errors.fitting(cls, cls.__spec__.attributes, grads, ctx.sizes)


def _is_base(base: Any, cls: Any) -> bool:
    """Whether a class is a declared base of another, with the same inner tensors: its method may return the base."""
    spec = getattr(base, "__spec__", None)
    return issubclass(cls, base) and spec is not None and spec.attributes == cls.__spec__.attributes


def wrap_cotangent(primal: Any, cotangent: Any, used: Sequence[bool] = ()) -> Any:
    """Calls the author's ``wrap_cotangent``.

    Args:
        primal: the value.
        cotangent: a plain one, of the outer size.
        used: for each inner tensor, whether its derivative is needed, and must have its size.

    Raises:
        DispatchError: it did not return a value with the inner tensors of ``primal``.
    """
    cls, wrapped = type(primal), primal.wrap_cotangent(cotangent)
    attributes = cls.__spec__.attributes
    if not isinstance(wrapped, cls) and not _is_base(type(wrapped), cls):
        raise DispatchError(
            f"{cls.__name__}.wrap_cotangent: expected {one_of(cls)} with the derivatives by each inner tensor, got "
            f"{one_of(type(wrapped))}",
            code="cotangent-wrapped",
            hint=f"return {cls.__name__}({', '.join(cls.__spec__.inner_names)}) of those",
        )
    for name, is_used in zip(attributes, used, strict=False):
        wanted, got = primal.__dict__[name], wrapped.__dict__[name]
        if is_used and got is not None and known_to_differ(got.shape, wanted.shape):
            raise DispatchError(
                f"{cls.__name__}.wrap_cotangent: expected a derivative of size {tuple(wanted.shape)} by "
                f"{name.removeprefix(RAW)}, got one of size {tuple(got.shape)}",
                code="cotangent-wrapped",
            )
    return wrapped


def pull_back(primal: Any, cotangent: Tensor) -> Any:
    """Converts a plain cotangent to one of the class: the VJP of ``materialize``, by :func:`torch.autograd.grad`."""
    create_graph = torch.is_grad_enabled()
    inners = inner_tensors(primal)
    with torch.enable_grad():
        leaves = [make_leaf(t, create_graph) if is_differentiable(t) else t for t in inners]
        wanted = [t for t in leaves if is_differentiable(t)]
        grads = torch.autograd.grad(
            # An open wrapper: its inner tensors require grad, so that autograd records `materialize`.
            with_inners(primal, leaves).materialize(),
            wanted,
            cotangent,
            allow_unused=True,
            materialize_grads=True,
            create_graph=create_graph,
        )
    rest = iter(grads)
    inners = [without_lazy_bits(next(rest)) if is_differentiable(t) else t for t in leaves]
    return _construct_cotangent(primal._layout, dynamic_ints(primal), inners)


def make_leaf(t: Tensor, create_graph: bool) -> Tensor:
    """Returns a tensor to differentiate by: an autograd leaf, or in a double backward a view with the tensor's history.

    Each inner tensor has its own view, since one may depend on another, or be the same tensor.
    """
    return t.view_as(t) if create_graph and t.requires_grad else Tensor.requires_grad_(t.detach())


def cotangent_like(x: Any, given: Sequence[Tensor | None]) -> Any:
    """Constructs a cotangent of a value from its inner tensors' cotangents, with zeros for each that is None."""
    inners = [
        _zero_like(t) if g is None else without_lazy_bits(g)
        for t, g in zip(inner_tensors(x), given, strict=True)
    ]
    return _construct_cotangent(x._layout, dynamic_ints(x), inners)


def _construct_cotangent(layout: Layout, dynamics: tuple[Any, ...], inners: Sequence[Any]) -> Any:
    """Constructs a cotangent of values with a layout; it contains cotangents of the values that they contain."""
    layout = cotangent_layout(layout)
    return construct(with_nested(layout, *inners) if layout.nested else layout, dynamics, *inners)


def _zero_like(t: Any) -> Any:
    if not is_differentiable(t):
        return t
    names = type(t).__spec__.attributes if hasattr(type(t), "__spec__") else None
    return torch.zeros_like(t) if names is None else cotangent_like(t, [None] * len(names))


class Like:
    """The size, dtype and device of a differentiable inner tensor, whose memory is free until the backward.

    Wrappers are kept as they are: values, and tensors of other classes.
    """

    __slots__ = ("device", "dtype", "size", "wrapper")

    def __init__(self, t: Any) -> None:
        self.wrapper = None if type(t) in PLAIN else t
        self.size, self.dtype, self.device = t.shape, t.dtype, t.device

    def filled(self, number: float) -> Any:
        """Returns a tensor with one number in all places; zeros of a value are its cotangent."""
        if self.wrapper is None:
            return torch.full(self.size, number, dtype=self.dtype, device=self.device)
        if number == 0:
            return _zero_like(self.wrapper)
        if is_declared(self.wrapper):
            inners = (
                Like(t).filled(number) if is_differentiable(t) else t for t in inner_tensors(self.wrapper)
            )
            return with_inners(self.wrapper, inners)
        return self.wrapper.new_full((), number).expand(self.size)


class Unwrap(torch.autograd.Function):
    """Some inner tensors as functions of the wrapper; the backward constructs a cotangent of its class."""

    jvp = staticmethod(errors.refuse_forward_mode)

    @staticmethod
    def forward(x: Any, names: tuple[str, ...], written: bool) -> tuple[Tensor, ...]:
        """Returns views that share the version counter, so that autograd notices a later write to the wrapper.

        PyTorch refuses a write to such a view, because the gradient of the wrapper would not include it.
        """
        stored = x.__dict__
        # `t[...]` is `alias` too, and takes half the time of an op that is called by its name.
        return tuple(
            [t[...] if (t := stored[n]).__class__ is Tensor else aten.alias.default(t) for n in names]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keeps the inner tensors: the values of non-differentiable ones, the size and dtype of the others."""
        x, names, written = inputs
        cls, stored = type(x), x.__dict__
        if cls is Tensor:
            return  # a transform of torch.func that does not differentiate by the value, which is inside of this
        ctx.set_materialize_grads(False)
        layout = stored["_layout"]
        # Only the size and dtype of a differentiable one are read, so a later write to it is not an error.
        likes = {n: Like(t) for n in layout.present if is_differentiable(t := stored[n])}
        fixed = {n: stored[n].clone() if written else stored[n] for n in layout.present if n not in likes}
        if fixed:
            ctx.save_for_backward(*fixed.values())
        ctx.layout, ctx.dynamics = layout, dynamic_ints(x)
        ctx.names, ctx.fixed, ctx.likes = names, tuple(fixed), likes

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns a cotangent of the class, with zeros for differentiable inner tensors that no gradient reaches."""
        gradients = [
            (n, without_lazy_bits(g)) for n, g in zip(ctx.names, cotangents, strict=True) if g is not None
        ]
        if not gradients:
            return None, None, None
        errors.check_plain(ctx.layout.cls, gradients, ctx.likes)
        by_name = dict(gradients) | dict(zip(ctx.fixed, ctx.saved_tensors, strict=True))
        by_name |= {n: like.filled(0) for n, like in ctx.likes.items() if n not in by_name}
        inners = [by_name.get(n) for n in ctx.layout.cls.__spec__.attributes]
        return _construct_cotangent(ctx.layout, ctx.dynamics, inners), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, names: tuple[str, ...], written: bool) -> tuple[Any, Any]:
        """Unwraps a value from outside of a transform: a wrapper itself is never batched."""
        return apply_function(Unwrap, x, names, written), tuple(None for _ in names)


class Operand(torch.autograd.Function):
    """A value as the operand of an op by formula; the backward converts the plain gradient of the op to a cotangent.

    All gradients of a value are cotangents then, which the engine adds, and which follow from the inner tensors that
    the op read. An argument of a graph may be a leaf: if leaves have plain gradients, and the graph reads no inner
    tensor of it, its gradient stays plain.
    """

    jvp = staticmethod(errors.refuse_forward_mode)

    @staticmethod
    def forward(x: Any) -> Any:
        """Returns another value of the same inner tensors, which only the op sees."""
        return with_inners(x, inner_tensors(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves the inner tensors, whose versions PyTorch compares."""
        (x,) = inputs
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.dynamics = x.__dict__["_layout"], dynamic_ints(x)
        is_plain_leaf = not type(x)._traits.has_leaf_cotangents and is_graph_argument(x)
        ctx.reads = x.__dict__.setdefault(READS, set()) if is_plain_leaf else None
        ctx.save_for_backward(*inner_tensors(x))

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        """Returns a cotangent of the class; one that is to be differentiated again stays a function of the value."""
        cls = ctx.layout.cls
        if cotangent is None or torch.is_grad_enabled() or ctx.reads == set():
            return cotangent
        cotangent = as_gradient(cls, cotangent)
        if isinstance(cotangent, cls):
            return cotangent
        inners = ctx.saved_tensors
        used = [is_differentiable(t) for t in inners]
        if not any(used):  # all gradients of such a value are plain
            return cotangent
        return as_cotangent(wrap_cotangent(cls._wrap(ctx.layout, *inners, *ctx.dynamics), cotangent, used))


def as_operand(x: Any) -> Any:
    """Returns a value that an op by formula takes; its gradient is converted before it is added to others."""
    if not hasattr(type(x), "__spec__") or BY_FORMULA in x.__dict__ or not is_recorded(x):
        return x
    traits = type(x)._traits
    if not traits.meets_plain_cotangents or (x.is_leaf and not traits.has_leaf_cotangents):
        return x
    return apply_function(Operand, x)


def is_recorded(x: Any) -> bool:
    """Whether autograd records ops on a value; Dynamo traces the conditions that it can evaluate."""
    if torch.compiler.is_dynamo_compiling():
        return x.requires_grad and torch.is_grad_enabled()
    return is_recording(x)


def unwrap(x: Any, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """Returns the inner tensors that these attributes hold; differentiable ones as functions of ``x``."""
    if not is_recorded(x):
        return tuple([x.__dict__[n] for n in names])
    has_rules = type(x)._has_formulas or type(x)._runs_above
    return _unwrap_readable(x, names) if has_rules else unwrap_recorded(x, names)


@leave_in_graph  # Dynamo has no record of the op that made a value
def _unwrap_readable(x: Any, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    if BY_FORMULA in x.__dict__:
        raise errors.formula_error(type(x))
    return unwrap_recorded(x, names)


def unwrap_recorded(x: Any, names: tuple[str, ...], *, written: bool = False) -> tuple[Tensor | None, ...]:
    """Returns inner tensors where autograd records, the differentiable ones as functions of a value.

    Args:
        x: The value.
        names: The attributes of the inner tensors.
        written: Whether the value is written to next: inner tensors that a backward needs are copied.
    """
    stored = x.__dict__
    # As `is_differentiable`, which is called for each inner tensor that a rule reads.
    wanted = tuple(
        [n for n in names if (t := stored[n]) is not None and (t.is_floating_point() or t.is_complex())]
    )
    if wanted and stored[wanted[0]].__class__ is not Tensor and is_graph_argument(x):
        stored.setdefault(READS, set()).update(wanted)
    unwrapped = apply_function(Unwrap, x, wanted, written) if wanted else ()
    if wanted == names:
        return unwrapped
    by_name = dict(zip(wanted, unwrapped, strict=True))
    return tuple([by_name[n] if n in by_name else stored[n] for n in names])


def unwrap_one(x: Any, name: str) -> Tensor | None:
    """Returns one inner tensor; a differentiable one as a function of ``x``."""
    return unwrap(x, (name,))[0]


# ---- open wrappers -----------------------------------------------------------------------------------------


def open_wrapper(x: Any) -> Any:
    """Returns a value whose inner tensors are differentiable functions of ``x``, for code that reads them raw.

    The value itself does not require grad: autograd records only ops on its inner tensors.
    """
    return with_inners(x, unwrap(x, type(x).__spec__.attributes))


# ---- conversions of gradients and tangents ------------------------------------------------------------------


def as_cotangent(x: Any) -> Any:
    """Returns a value as a cotangent of its class, with the same inner tensors; values inside of it, too."""
    layout = cotangent_layout(x._layout)
    if layout is x._layout:
        return x
    inners = unwrap(x, type(x).__spec__.attributes)
    if layout.nested:
        inners = tuple([_inner_cotangent(t) for t in inners])
        layout = with_nested(layout, *inners)
    return construct(layout, dynamic_ints(x), *inners)


def _inner_cotangent(t: Any) -> Any:
    return as_cotangent(t) if hasattr(type(t), "__spec__") and is_differentiable(t) else t


def as_gradient(cls: Any, g: Any) -> Any:
    """Returns a gradient that reaches a value of a class as a cotangent or a plain tensor.

    A PyTorch formula that multiplies a plain gradient by a value of a structure computes a value, which holds the
    derivatives by inner tensors.

    Raises:
        DispatchError: the gradient is a value of a representation, which an author's function made.
    """
    if not isinstance(g, cls) or type(g)._is_cotangent or not cls._traits.has_cotangents:  # type: ignore[attr-defined]
        return g
    if cls._traits.is_representation:
        raise errors.value_gradient_error(cls)
    return as_cotangent(g)


def coerce_tangent(x: Any, expected: Any, expected_type: type | None) -> Any:
    """Converts a tangent to the metadata that was traced; returns None if that is impossible."""
    if not isinstance(expected, Layout) or not are_alike(x._layout, expected):
        return None
    tangent = as_cotangent(as_gradient(type(x), x)) if expected.cotangent else with_layout(x, expected)
    return tangent if tangent._layout is expected else None


def with_layout(x: Any, layout: Layout) -> Any:
    """Returns a value with the same inner tensors and another layout; where autograd records, a function of ``x``."""
    return construct(layout, dynamic_ints(x), *unwrap(x, type(x).__spec__.attributes))


# The engine calls these, also where a compiled function calls `backward()` between two graphs: Dynamo would compile
# each as a frame of the user.
for _function in (Construct, Unwrap, Operand):
    skip_frames(_function.backward)
