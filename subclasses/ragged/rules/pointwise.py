"""Pointwise ops of ragged tensors, and ``torch.equal``.

A pointwise op runs below autograd on the stored tensor, so that it is one node of the autograd graph as for plain
tensors. Above autograd a rule converts two kinds of operands, since a cotangent has the class of the result: a ragged
operand with its entries at other stored positions, and a dense operand with a value for each entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import foreach_functions
from subclasses.autograd.python_functions import tagged_functions
from subclasses.errors import DispatchError
from subclasses.ragged.base import first_ragged, shown, unruled
from subclasses.ragged.registry import Rules

RULES = Rules()
aten = torch.ops.aten

# ---- which ops -------------------------------------------------------------------------------------------------

# Pointwise ops without the tag.
UNTAGGED = (
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.complex,
    aten.elu_backward,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide,
    aten.hardshrink_backward,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.masked_fill.Tensor,
    aten.polar,
    aten.rrelu_with_noise_backward,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.softplus_backward,
    aten.softshrink_backward,
    aten.zero.default,
)

# `max` and `min` of two tensors and `rrelu` are pointwise, and `equal` has the tag; their rules are elsewhere.
ELSEWHERE = ("equal", "max", "min", "rrelu")
FUNCTIONS = [f for f in tagged_functions(torch.Tag.pointwise) if f.__name__ not in ELSEWHERE]
FUNCTIONS += [torch.floor_divide, torch.Tensor.floor_divide, torch.complex, torch.polar]
FUNCTIONS += [torch.where, torch.Tensor.where, torch.Tensor.copy_]
FUNCTIONS = list(dict.fromkeys(FUNCTIONS))

# ---- pointwise -------------------------------------------------------------------------------------------------


@RULES.of(torch.Tag.pointwise, *UNTAGGED)
def pointwise(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a pointwise op on stored tensors; below autograd."""
    x = first_ragged((*args, *kwargs.values()))
    given = {k: _stored_operand(op, x, a) for k, a in kwargs.items()} if kwargs else kwargs
    result = op(*[_stored_operand(op, x, a) for a in args], **given)
    if isinstance(result, tuple):
        return tuple(x.with_stored(part) for part in result)
    return x.with_stored(result)


def _stored_operand(op: Any, x: Any, a: Any) -> Any:
    if a is x:
        return x.stored
    return x.beside(op, a) if isinstance(a, Tensor) else a


@RULES.of(*FUNCTIONS)
def settle(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Converts operands to the rows of the first ragged one, then runs the op without its rule; above autograd."""
    if len(args) + len(kwargs) == 1:
        return unruled(func, *args, **kwargs)
    x = first_ragged((*args, *kwargs.values()))
    if args and func.__name__.endswith("_"):
        if not isinstance(args[0], x.ragged_class):
            raise DispatchError(
                f"{func.__name__}: cannot write {shown(x)} into {shown(args[0])}",
                code="write-misfit",
                hint="use to_dense()",
            )
        args[0].check_writable(func, *args[1:])
    given = {k: _aligned(func, x, a) for k, a in kwargs.items()} if kwargs else kwargs
    return unruled(func, *[_aligned(func, x, a) for a in args], **given)


def _aligned(func: Any, x: Any, a: Any) -> Any:
    return x.aligned(func, a) if isinstance(a, Tensor) and a is not x else a


# ---- lists -----------------------------------------------------------------------------------------------------

# Keywords of ops on lists that are not operands.
OPTIONS = ("alpha", "dtype", "non_blocking", "ord", "value")
# Ops on lists that take numbers, where the op of the same name on one tensor takes none.
LIMITS = {"maximum": ("maximum", "clamp_min"), "minimum": ("minimum", "clamp_max")}


@RULES.of(*(f for f in foreach_functions if f.__name__ != "_foreach_powsum"))  # tensors have no such method
def each_of_lists(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an op on lists of tensors for one element after the other, as PyTorch does where it has no fused kernel."""
    args = (*args, *(v for k, v in kwargs.items() if k not in OPTIONS))
    options = {k: v for k, v in kwargs.items() if k in OPTIONS}
    lists = [a for a in args if isinstance(a, list | tuple)]
    if len({len(a) for a in lists}) > 1:
        raise RuntimeError(f"{func.__name__}: expected lists of one length, got {[len(a) for a in lists]}")
    name = func.__name__.removeprefix("_foreach_")
    if name.strip("_") in ("addcmul", "addcdiv"):
        args, options["value"] = args[:3], (*args[3:], options.get("value", 1))[0]
    if name.strip("_") in LIMITS and not isinstance(_element(args[1], 0), Tensor):
        name = name.replace(*LIMITS[name.strip("_")])
    run = _of_one(name)
    results = [
        run(*(_element(a, k) for a in args), **{n: _element(v, k) for n, v in options.items()})
        for k in range(len(lists[0]))
    ]
    return args[0] if name.endswith("_") else tuple(results)


def _of_one(name: str) -> Any:
    """Returns the function of one tensor that an op on lists runs for each element."""
    if name in ("maximum_", "minimum_"):  # tensors have no such methods
        return lambda x, other: x.copy_(getattr(torch, name[:-1])(x, other))
    return torch.linalg.vector_norm if name == "norm" else getattr(torch, name, None) or getattr(Tensor, name)


def _element(value: Any, k: int) -> Any:
    """Returns the item for element ``k`` of a list, or of a plain tensor of one dimension; any other value itself."""
    each = isinstance(value, list | tuple) or (type(value) is Tensor and value.dim() == 1)
    return value[k] if each else value


# ---- comparing -------------------------------------------------------------------------------------------------


@RULES.of(torch.equal)
def equal(func: Any, input: Any, other: Any) -> bool:
    """Returns whether the rows are equal; rows of other shapes or lengths are not."""
    layout = first_ragged((input, other)).ragged_class
    for t in (input, other):
        if not isinstance(t, layout):
            raise DispatchError(
                f"{func.__name__}: expected two {layout.__name__}s, got {shown(t)}", code="argument-refused"
            )
    if input.shape != other.shape or input.row_dims != other.row_dims:
        return False
    return torch.equal(input.counts, other.counts) and bool((input == other).all())
