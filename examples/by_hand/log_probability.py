"""`classes/log_probability.py` without the library: the same class, written by hand on PyTorch alone.

The gradient by logarithms is a `LogProbability` that is marked as a cotangent: autograd adds two of them with the op
that would add probabilities. A plain gradient is one by the probabilities.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class LogProbability(Tensor):
    """Non-negative numbers `exp(values)`; `values` is differentiable to read."""

    _logarithms: Tensor
    is_cotangent: bool
    primal = None  # of a cotangent, the logarithms that it belongs to

    @staticmethod
    def __new__(cls, values):
        if not values.is_floating_point():
            raise NotImplementedError(f"a LogProbability holds floating-point logarithms, not {values.dtype}")
        if type(values) is Tensor:
            values = values.resolve_neg()
        if torch.is_grad_enabled() and values.requires_grad:
            return Construct.apply(values, False)
        return cls.wrap(values.detach())

    @classmethod
    def wrap(cls, values, is_cotangent=False):
        self = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        self._logarithms, self.is_cotangent = values, is_cotangent
        return self

    @property
    def values(self):
        return unwrap(self)

    def materialize(self) -> Tensor:
        return unwrap(self).exp()

    def __tensor_flatten__(self):
        return ["_logarithms"], self.is_cotangent

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, is_cotangent, outer_size, outer_stride):
        return cls.wrap(inner_tensors["_logarithms"], is_cotangent)

    def __coerce_tangent_metadata__(self):
        return LogProbability.wrap(self._logarithms, is_cotangent=True)

    def __coerce_same_metadata_as_tangent__(self, is_cotangent, expected_type=None):
        if expected_type in (None, LogProbability):
            return LogProbability.wrap(self._logarithms, is_cotangent)
        return None

    def __repr__(self, *, tensor_contents=None):
        return f"LogProbability(values={self._logarithms!r})"

    def __reduce_ex__(self, protocol):
        return rebuild, (self._logarithms, self.is_cotangent, self.requires_grad)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("only leaves can be copied deeply")
        if id(self) not in memo:
            memo[id(self)] = rebuild(self._logarithms.clone(), self.is_cotangent, self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = FUNCTIONS.get(func)
        if rule is not None and "out" not in kwargs:
            return rule(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, LogProbability)]
        known = {type(t) for x in operands for t in (x, x._logarithms)}
        if any(is_traceable_wrapper_subclass_type(t) and t not in known for t in types):
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            return run(func, operands, args, kwargs)


@torch._dynamo.allow_in_graph
def unwrap(x: LogProbability) -> Tensor:
    """The logarithms, as a differentiable function of the probabilities."""
    return Unwrap.apply(x) if x.requires_grad and torch.is_grad_enabled() else x._logarithms


def rebuild(values, is_cotangent, requires_grad):
    return LogProbability.wrap(values, is_cotangent).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])


class Construct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, is_cotangent):
        ctx.save_for_backward(values)
        return LogProbability.wrap(values.detach(), is_cotangent)

    @staticmethod
    def backward(ctx, g):
        (values,) = ctx.saved_tensors
        return unwrap(g) if isinstance(g, LogProbability) else g * values.exp(), None


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.primal = x._logarithms if type(x._logarithms) is Tensor else None  # a trace has no use for it
        return x._logarithms.view_as(x._logarithms)

    @staticmethod
    def backward(ctx, values):
        cotangent = Construct.apply(values, True)
        cotangent.primal = ctx.primal
        return cotangent


# ---- rules above autograd ----------------------------------------------------------------------------------


def log(operand: Any, like: Any) -> Tensor:
    """The logarithm of an operand, which is a LogProbability or a number that is not negative."""
    if isinstance(operand, LogProbability):
        return unwrap(operand)
    if isinstance(operand, Tensor):
        raise NotImplementedError("a plain tensor may be negative: pass LogProbability(tensor.log())")
    if operand < 0:
        raise ValueError(f"a LogProbability cannot represent the negative number {operand}")
    return unwrap(like).new_full((), operand).log()


def logs(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    like = x if isinstance(x, LogProbability) else y
    return log(x, like), log(y, like)


def mul(x, y):
    a, b = logs(x, y)
    return LogProbability(a + b)


def div(x, y):
    a, b = logs(x, y)
    return LogProbability(a - b)


def divided_by(x, y):
    return div(y, x)


def reciprocal(x):
    return LogProbability(-unwrap(x))


def add(x, y):
    return LogProbability(torch.logaddexp(*logs(x, y)))


def total(x, dim=None, keepdim=False):
    values = unwrap(x)
    dims = tuple(range(values.ndim)) if dim is None or dim == () else dim
    return LogProbability(torch.logsumexp(values, dims, keepdim))


def product(x, dim=None, keepdim=False):
    return LogProbability(unwrap(x).sum(dim, keepdim))


def comparison(function):
    return lambda x, y: function(*logs(x, y))


TABLE = [
    (mul, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__),
    (div, torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide),
    (div, Tensor.__truediv__),
    (divided_by, Tensor.__rtruediv__, Tensor.__rdiv__),
    (reciprocal, torch.reciprocal, Tensor.reciprocal),
    (add, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__),
    (total, torch.sum, Tensor.sum),
    (product, torch.prod, Tensor.prod),
]
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    function = getattr(torch, name)
    TABLE.append((comparison(function), function, getattr(Tensor, name), getattr(Tensor, f"__{name}__")))
FUNCTIONS = {function: rule for rule, *functions in TABLE for function in functions}

# ---- rules below autograd ----------------------------------------------------------------------------------

STRUCTURAL = {
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default),
    *(aten.empty_like.default, aten.new_empty_strided.default, aten.lift_fresh.default),
    *(aten.view.default, aten._unsafe_view.default, aten.select.int, aten.slice.Tensor, aten.permute.default),
    *(aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.as_strided.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.select_backward.default, aten.slice_backward.default),
}
LINEAR = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.zeros_like.default),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
}


def run(func, operands, args, kwargs):
    x, dtype = operands[0], kwargs.get("dtype")
    if func in STRUCTURAL and (dtype is None or dtype.is_floating_point):
        out = LogProbability.wrap(func(x._logarithms, *args[1:], **kwargs), x.is_cotangent)
        return return_and_correct_aliasing(func, args, kwargs, out)
    if func is aten.copy_.default and all(isinstance(t, LogProbability) for t in args[:2]):
        x._logarithms.copy_(args[1]._logarithms)
        return x
    cotangents = [g for g in operands if g.is_cotangent]
    if cotangents and func in LINEAR:
        return on_cotangents(func, cotangents[0].primal, args, kwargs)
    out = func.decompose(*args, **kwargs)  # in inference mode composite ops arrive whole
    if out is NotImplemented:
        raise NotImplementedError(f"LogProbability has no rule for {func}")
    return out


def on_cotangents(func, primal, args, kwargs):
    if func is aten.add.Tensor and primal is not None:  # one of two may be plain, by the probabilities
        args = [g._logarithms if isinstance(g, LogProbability) else g * primal.exp() for g in args]
    elif any(isinstance(t, Tensor) and t.ndim and not isinstance(t, LogProbability) for t in args):
        raise NotImplementedError(f"{func} on a gradient of a LogProbability and a plain tensor")
    else:
        args = [g._logarithms if isinstance(g, LogProbability) else g for g in args]
    out = LogProbability.wrap(func(*args, **kwargs), is_cotangent=True)
    out.primal = primal
    return out
