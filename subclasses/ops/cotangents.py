"""Arithmetic of cotangents: always on inner tensors, whatever the class represents.

For a class that represents a plain tensor, ``x + y`` adds the represented tensors. The autograd engine adds two
cotangents with the same op, but their sum is the sum of their inner tensors. The layout distinguishes the two: a value
that a backward made, and hence the gradient of an autograd leaf, is marked as a cotangent. Vector space ops on marked
values run on the differentiable inner tensors; the other inner tensors are those of the first operand. Any other op
that would materialize a marked value is refused, since a cotangent represents no plain tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import OpOverload, in_backward, nodes_ahead
from subclasses._torch_tracing import backward_node, in_formula, is_called_by_engine
from subclasses.autograd.construct import (
    PRIMAL,
    Construct,
    Primal,
    as_cotangent,
    is_differentiable,
    with_layout,
)
from subclasses.errors import DispatchError, one_of
from subclasses.layout import cotangent_layout, value_layout
from subclasses.ops.aliasing import bump_versions
from subclasses.ops.schema import op_facts
from subclasses.spec.values import with_inners

aten = torch.ops.aten

ADDITIVE_OPS = frozenset({aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor})
SCALING_OPS = frozenset(
    {
        aten.mul.Tensor,
        aten.mul_.Tensor,
        aten.mul.Scalar,
        aten.mul_.Scalar,
        aten.div.Tensor,
        aten.div_.Tensor,
        aten.div.Scalar,
        aten.div_.Scalar,
        aten.neg.default,
        aten.neg_.default,
        aten.zero_.default,
        aten.zeros_like.default,
    }
)


def is_cotangent(x: Any) -> bool:
    """Whether a value is marked as a cotangent."""
    layout = _layout_of(x)
    return layout is not None and layout.cotangent


def _layout_of(x: Any) -> Any:
    return getattr(x, "_layout", None) if isinstance(x, Tensor) else None


def with_cotangent_arithmetic(
    cls: Any, op: OpOverload, run: Callable[..., Any], is_ruled: bool
) -> Callable[..., Any]:
    """Wraps ``run`` so that an op adds or scales marked values one inner tensor at a time.

    Args:
        cls: the class.
        op: the op.
        run: its plan.
        is_ruled: whether the plan is a rule of the author, who answers for factors that are no numbers: the derivative
            of a product multiplies a cotangent by a value.

    Raises:
        DispatchError: from the plan, if the other operand is not a matching cotangent or a number.
    """
    if op not in ADDITIVE_OPS and op not in SCALING_OPS:
        return run

    def plan(x: Any, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else None
        if not (is_cotangent(x) or is_cotangent(other)):
            return run(x, *args, **kwargs)
        if op is aten.add.Tensor and not kwargs:
            x, other = wrap_plain_cotangent(x, other)
            args = (other,)
        if op in ADDITIVE_OPS:
            fits = isinstance(x, cls) and isinstance(other, cls) and _layout_of(x) is _layout_of(other)
        else:
            fits = isinstance(x, cls) and not _has_dims(other)
        if fits:
            return _apply(op, x, args, kwargs)
        if is_ruled and op in SCALING_OPS:
            return run(x, *args, **kwargs)
        raise mixed_error(cls, op, x, other)

    return plan


def with_marked_sums(cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of ``add``: what the engine adds are gradients, also where an autograd function made them.

    A function's backward may return a value of the class, made by its constructor, and so may a caller give one. The
    latter is marked where it is given, except to a class without rules, of which PyTorch asks no functions. Its
    formulas, on the other hand, add values of a class with rules alone.
    """

    def plan(x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        both = isinstance(x, cls) and isinstance(other, cls)
        if both and is_called_by_engine(formulas=not (cls._has_function_rules or cls._keeps_history)):
            x, other = (v if is_cotangent(v) else as_cotangent(v) for v in (x, other))
        return run(x, other, *args, **kwargs)

    return plan


def with_wrapped_sums(cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of ``add`` of a mapped class whose author says what a plain cotangent means for inner tensors.

    Raises:
        DispatchError: from the plan, for a sum of the engine's, if the value that the method is of is not known.
    """

    def plan(x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, cls) is not isinstance(other, cls) and is_called_by_engine(formulas=True):
            x, other = wrap_plain_cotangent(x, other)
            if isinstance(x, cls) is not isinstance(other, cls):
                raise mixed_error(cls, aten.add.Tensor, x, other)
        out = run(x, other, *args, **kwargs)
        primal = next(
            (v.__dict__[PRIMAL] for v in (x, other) if isinstance(v, cls) and PRIMAL in v.__dict__), None
        )
        if primal is not None and is_cotangent(out):
            out.__dict__[PRIMAL] = primal
        return out

    return plan


def with_summed_cotangents(cls: Any, op: OpOverload, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule for a sum: a formula of PyTorch's that sums a cotangent sums its inner tensors.

    The rule says what the sum of values is, which need not be linear in the inner tensors. A formula asks for the sum
    of a broadcast operand's cotangent, where it is. The rule is kept where it returns a plain tensor, the gradient of
    a plain operand, and where inner tensors have other sizes than the value.
    """

    def plan(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(x, *args, **kwargs)
        is_one = isinstance(x, cls) and isinstance(out, cls) and is_cotangent(x)
        if not (is_one and in_formula() and all(t is None or t.shape == x.shape for t in _inners(x))):
            return out
        summed = [None if t is None else op(t, *args, **kwargs).to(t.dtype) for t in _inners(x)]
        return with_inners(x, summed)

    return plan


def _inners(x: Any) -> list[Any]:
    return [x.__dict__[name] for name in type(x).__spec__.attributes]


def with_anomaly_check(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of an op by which ``detect_anomaly`` asks each cotangent for NaNs: one answer for all of it."""
    if op not in _OF_ANOMALY_CHECK:
        return run

    def plan(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not (
            isinstance(x, cls) and in_backward() and (is_cotangent(x) or not cls.__spec__.stands_for_plain)
        ):
            return run(x, *args, **kwargs)
        asked = [t for t in _inners(x) if t is not None and (is_differentiable(t) or t.dtype is torch.bool)]
        found = [op(t).any() for t in asked]
        return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=x.device)

    return plan


def with_absent_gradients(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the plan of an op that computes gradients: of an absent gradient they are absent.

    Formulas of PyTorch's for ops with several operands, such as attention, leave it to a kernel to see that the
    gradient is absent. No kernel runs in a trace, and the op would be part of the program.
    """
    facts = op_facts(op)
    gradients = [i for i, a in enumerate(facts.arguments) if a.kind == "tensor" and a.name.startswith("grad")]
    if not gradients or not op.name().partition(".")[0].endswith("_backward") or facts.written:
        return run
    absent = None if len(facts.returns) == 1 else (None,) * len(facts.returns)

    def plan(*args: Any, **kwargs: Any) -> Any:
        is_absent = len(args) > gradients[-1] and all(args[i] is None for i in gradients)
        return absent if is_absent else run(*args, **kwargs)

    return plan


_OF_ANOMALY_CHECK = frozenset({aten.isnan.default, aten._is_any_true.default})


def with_mapped_cotangents(
    cls: Any, run: Callable[..., Any], make_mapped: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Wraps the plan of a mapped class: a formula of PyTorch's applies an op to the inner tensors of a cotangent.

    Such formulas are those of ops that are mapped; what a rule computed has the derivatives of its own ops.
    """
    made = functools.cache(make_mapped)

    def plan(*args: Any, **kwargs: Any) -> Any:
        if not (any(is_cotangent(x) for x in args) and in_formula()):
            return run(*args, **kwargs)
        values = [with_layout(x, value_layout(x._layout)) if is_cotangent(x) else x for x in args]
        out = made()(*values, **kwargs)
        _mark(cls, out, args)
        return out

    return plan


def with_marked_results(cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a rule of a class that marks cotangents, so that what it computes from a gradient is one.

    A derivative is linear in the cotangent, so what a rule computes from one in a backward is one. An author's rule
    constructs a value, and a value adds as what it represents. Computed from a marked cotangent it is marked too; from
    a plain one, as the derivative of ``x * y`` is by a product with ``y``, it is the tensor that the value represents.
    """
    represents = cls.__spec__.stands_for_plain

    def plan(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        for x in args:
            if isinstance(x, list | tuple):
                marked = any(isinstance(t, cls) and t.__dict__["_layout"].cotangent for t in x)
            else:
                marked = isinstance(x, cls) and x.__dict__["_layout"].cotangent
            if marked:
                _mark(cls, out, args)
                return out
        if (
            represents
            and in_backward()
            and any(isinstance(x, Tensor) and not isinstance(x, cls) for x in args)
            and in_formula()
        ):
            return _represented(cls, out)
        return out

    return plan


def _represented(cls: Any, out: Any) -> Any:
    if isinstance(out, list | tuple):
        return type(out)(_represented(cls, x) for x in out)
    return out.materialize() if isinstance(out, cls) else out


def _mark(cls: Any, out: Any, operands: tuple[Any, ...]) -> None:
    for x in out if isinstance(out, list | tuple) else (out,):
        if isinstance(x, cls) and all(x is not operand for operand in operands):
            x.__dict__["_layout"] = cotangent_layout(x._layout)


def wrap_plain_cotangent(x: Any, y: Any) -> tuple[Any, Any]:
    """Converts the plain one of two cotangents of the same value to a cotangent of the class.

    The autograd engine adds such a pair if a function reads inner tensors with ``unwrap`` and also uses the value as a
    whole. Both stay unchanged if the sum has to be differentiable, or if the value's inner tensors are not known.
    """
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return x, y
    primal = next((v.__dict__[PRIMAL] for v in (x, y) if is_cotangent(v) and PRIMAL in v.__dict__), None)
    differentiable = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if differentiable or x.shape != y.shape or (primal := primal or _primal_ahead(x, y)) is None:
        return x, y
    return tuple(_as_cotangent_of(primal, v) for v in (x, y))  # type: ignore[return-value]


def _primal_ahead(x: Any, y: Any) -> Primal | None:
    """Returns what a plain cotangent needs of the value to which a sum leads; that of AOTAutograd does not know it."""
    cotangent = next((v for v in (x, y) if is_cotangent(v)), None)
    if cotangent is None or not type(cotangent)._saves_inners:
        return None
    ahead = nodes_ahead(cotangent.shape)
    value: Any = _value_at(ahead[0]) if len(ahead) == 1 else None
    is_it = type(value) is type(cotangent) and cotangent_layout(value._layout) is cotangent._layout
    return Primal(value) if is_it else None


def _value_at(node: Any) -> Any:
    """Returns the value whose gradient a node takes: a leaf, or what was made of inner tensors."""
    if type(node) is Construct._backward_cls:
        return (
            node.layout.cls._wrap(node.layout, *node.saved_tensors, *node.dynamics)
            if node.saved_tensors
            else None
        )
    return getattr(node, "variable", None)


def _as_cotangent_of(primal: Any, v: Any) -> Any:
    """Returns one of two cotangents as one of the class; a caller of ``backward`` gives it the class without a mark."""
    if is_cotangent(v):
        return v
    return as_cotangent(v) if type(v) is primal.layout.cls else primal.wrap_cotangent(v)


def _apply(op: OpOverload, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec, other = type(x).__spec__, args[0] if args else None
    results = []
    for name in spec.attributes:
        t = x.__dict__[name]
        if is_differentiable(t):
            t = op(t, *([other.__dict__[name], *args[1:]] if isinstance(other, type(x)) else args), **kwargs)
        results.append(t)
    if op.overloadpacket.__name__.endswith("_"):
        bump_versions([t for t in results if is_differentiable(t)])
        return x
    out = with_inners(x, results)
    if PRIMAL in x.__dict__ or (isinstance(other, type(x)) and PRIMAL in other.__dict__):
        out.__dict__[PRIMAL] = x.__dict__.get(PRIMAL) or other.__dict__[PRIMAL]
    return out


def _has_dims(other: Any) -> bool:
    return isinstance(other, Tensor) and other.dim() > 0


def mixed_error(cls: Any, op: OpOverload, x: Any, other: Any) -> DispatchError:
    """Returns the error for operands that are no matching cotangents and numbers."""
    shown = [
        one_of(type(v)) + " cotangent" * is_cotangent(v) if hasattr(type(v), "__spec__") else "a plain tensor"
        for v in (x, other)
    ]
    if in_backward():
        mend = (
            "Part of the function reads inner tensors with unwrap(), or returns the value, and part uses it as a whole"
            + ", which a backward with create_graph=True cannot add" * torch.is_grad_enabled()
            + ": let both read inner tensors. Where `x[i] += y` wrote to a view, write x[i].add_(y). Where a compiled "
            "function writes to a value in place, and what it returned is read, compile it with desugar.compile: "
            "torch.compile takes each result for a use as a whole"
        )
    elif cls.__spec__.trainable:
        mend = (
            "A step of an optimizer takes Parameters, their gradients as a backward makes them, what torch.zeros_like "
            "gives for a Parameter, and numbers; make another value a Parameter first, as "
            "torch.nn.Parameter(value, requires_grad=False)"
        )
    else:
        mend = (
            f"If this is a step of an optimizer, declare {cls.__name__} with trainable=True, which lets it update each "
            f"inner tensor, or make the inner tensors parameters"
        )
    return DispatchError(
        f"{op} on {shown[0]} and {shown[1]}: cotangents of {one_of(cls)} are added to one another and scaled by "
        f"numbers only. {mend}"
    )


def check_no_cotangents(cls: Any, op: OpOverload, wrappers: list[Any]) -> None:
    """Raises DispatchError if a value to be materialized is marked as a cotangent."""
    if any(x._layout.cotangent for x in wrappers):
        name = op.overloadpacket.__name__
        if name.removesuffix("_backward") in _VIEWS_WITH_DERIVATIVES:
            mend = (
                f"it is the derivative of a view by your rule: add a rule for it with @{cls.__name__}.implements("
                f"torch.ops.aten.{name}), which puts the inner tensors of a cotangent at their place among zeros"
            )
        elif name.endswith("_backward"):
            mend = f"{NO_DERIVATIVE}; or add a rule with @{cls.__name__}.implements(torch.ops.{op})"
        elif "AsStrided" in backward_node():
            mend = (
                "it is the derivative of a view by your rule, which torch.compile has remade with as_strided: compile "
                "the function with desugar.compile, or return a clone() of the view"
            )
        elif in_formula():
            mend = (
                f"PyTorch's derivative of another op ({backward_node()}) asks for it: let that op compute with the "
                f"inner tensors, x.unwrap(), or with x.materialize()"
            )
        else:
            mend = "read its inner tensors instead"
            if not (in_backward() or cls.__spec__.trainable):
                mend += f", or, for an optimizer, declare {cls.__name__} with trainable=True"
        raise DispatchError(
            f"{op} on a cotangent of {cls.__name__} (a gradient, say), which does not represent a plain tensor; {mend}"
        )


_VIEWS_WITH_DERIVATIVES = ("slice", "select", "diagonal", "unfold")
# The way out for a class without a rule for what an op's derivative calls.
NO_DERIVATIVE = (
    "it is the derivative of another op, and is not asked for if the rule of that one is registered for the "
    "function, such as torch.relu, and reads inner tensors with x.unwrap()"
)
