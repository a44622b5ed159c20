"""`classes/quaternion.py` without the library: the same class, written by hand on PyTorch alone.

The gradient of quaternions is a `Quaternion` of the gradients of their parts. Sums and views mean the same for both.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class Quaternion(Tensor):
    """`parts` [..., 4]: the real part and three imaginary ones; differentiable to read."""

    _parts: Tensor

    @staticmethod
    def __new__(cls, parts):
        if not parts.ndim or parts.shape[-1] != 4:
            raise ValueError(f"a Quaternion needs parts of size [..., 4], not {list(parts.shape)}")
        if type(parts) is Tensor:
            parts = parts.resolve_conj().resolve_neg()
        if torch.is_grad_enabled() and parts.requires_grad:
            return Construct.apply(parts)
        return cls.wrap(parts.detach())

    @classmethod
    def wrap(cls, parts):
        self = Tensor._make_wrapper_subclass(
            cls,
            parts.shape[:-1],
            strides=tuple(stride // 4 for stride in parts.stride()[:-1]),
            storage_offset=parts.storage_offset() // 4,
            dtype=parts.dtype,
            device=parts.device,
        )
        self._parts = parts
        return self

    @property
    def parts(self):
        return unwrap(self)

    def __tensor_flatten__(self):
        return ["_parts"], None

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls.wrap(inner_tensors["_parts"])

    def __repr__(self, *, tensor_contents=None):
        return f"Quaternion(parts={self._parts!r})"

    def __reduce_ex__(self, protocol):
        return rebuild, (self._parts, self.requires_grad)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("only leaves can be copied deeply")
        if id(self) not in memo:
            memo[id(self)] = rebuild(self._parts.clone(), self.requires_grad)
        return memo[id(self)]

    @classmethod
    def about(cls, axis: Tensor, angle: Tensor) -> "Quaternion":
        """The rotation about a unit vector [..., 3] by an angle [...]."""
        half = (angle / 2).unsqueeze(-1)
        imaginary = half.sin() * axis
        return cls(torch.cat([half.cos().expand(*imaginary.shape[:-1], 1), imaginary], -1))

    def conjugate(self) -> "Quaternion":
        parts = unwrap(self)
        return Quaternion(torch.cat([parts[..., :1], -parts[..., 1:]], -1))

    def rotate(self, v: Tensor) -> Tensor:
        """The vectors [..., 3], rotated by this, which need not have norm 1."""
        parts = unwrap(self)
        w, u = parts[..., :1], parts[..., 1:]
        v, u = torch.broadcast_tensors(v, u)
        twice = 2 * torch.linalg.cross(u, v) / parts.square().sum(-1, keepdim=True)
        return v + w * twice + torch.linalg.cross(u, twice)

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
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Quaternion)]
        known = {type(t) for q in operands for t in (q, q._parts)}
        if any(is_traceable_wrapper_subclass_type(t) and t not in known for t in types):
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            out = run(func, args, kwargs)
        return return_and_correct_aliasing(func, args, kwargs, out) if isinstance(out, Quaternion) else out


@torch._dynamo.allow_in_graph
def unwrap(q: Quaternion) -> Tensor:
    """The parts, as a differentiable function of the quaternions."""
    return Unwrap.apply(q) if q.requires_grad and torch.is_grad_enabled() else q._parts


def rebuild(parts, requires_grad):
    return Quaternion.wrap(parts).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])


class Construct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts):
        return Quaternion.wrap(parts.detach())

    @staticmethod
    def backward(ctx, g):
        if not isinstance(g, Quaternion):
            raise NotImplementedError("a plain tensor cannot be a gradient of a Quaternion")
        return unwrap(g)


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        return q._parts.view_as(q._parts)

    @staticmethod
    def backward(ctx, parts):
        return Construct.apply(parts)


# ---- rules above autograd ----------------------------------------------------------------------------------


def scale(func: Any, q: Quaternion, number: Any) -> Quaternion:
    """The product with a real number, or with a tensor of them, or the quotient."""
    if number.is_complex() if isinstance(number, Tensor) else isinstance(number, complex):
        raise NotImplementedError("a quaternion and a complex number")
    factor = number.unsqueeze(-1) if isinstance(number, Tensor) else number
    return Quaternion(func(unwrap(q), factor))


def mul(x, y):
    if not isinstance(y, Quaternion):
        return scale(torch.mul, x, y)
    if not isinstance(x, Quaternion):
        return scale(torch.mul, y, x)
    (a, b, c, d), (e, f, g, h) = unwrap(x).unbind(-1), unwrap(y).unbind(-1)
    real, i = a * e - b * f - c * g - d * h, a * f + b * e + c * h - d * g
    j, k = a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e
    return Quaternion(torch.stack([real, i, j, k], -1))


def div(x, y):
    return mul(x, reciprocal(y)) if isinstance(y, Quaternion) else scale(torch.div, x, y)


def divided_by(x, y):
    return mul(y, reciprocal(x))


def conj(q):
    raise NotImplementedError("write q.conjugate(): PyTorch may leave out conj() where the dtype is real")


def norm(q):
    return torch.linalg.vector_norm(unwrap(q), dim=-1)


def reciprocal(q):
    return scale(torch.div, q.conjugate(), unwrap(q).square().sum(-1))


TABLE = (
    (mul, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__),
    (div, torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide),
    (div, Tensor.__truediv__),
    (divided_by, Tensor.__rtruediv__, Tensor.__rdiv__),
    (conj, torch.conj, torch.conj_physical, Tensor.conj, Tensor.conj_physical),
    (norm, torch.abs, torch.absolute, Tensor.abs, Tensor.absolute, Tensor.__abs__),
    (reciprocal, torch.reciprocal, Tensor.reciprocal),
)
FUNCTIONS = {function: rule for rule, *functions in TABLE for function in functions}

# ---- rules below autograd ----------------------------------------------------------------------------------


def same_parts(func, q, *args, **kwargs):
    return func(q._parts, *args, **kwargs)


def add(func, x, y, **alpha):
    if not (isinstance(x, Quaternion) and isinstance(y, Quaternion)):
        raise NotImplementedError("a quaternion is added to a quaternion alone")
    return func(x._parts, y._parts, **alpha)


def to_size(func, q, size, **kwargs):
    return func(q._parts, [*size, 4], **kwargs)


def by_dim(func, q, dim=0, *args, **kwargs):
    return func(q._parts, dim - (dim < 0), *args, **kwargs)


def backward_by_dim(func, q, size, dim, *args):
    return func(q._parts, [*size, 4], dim - (dim < 0), *args)


def total(func, q, dim=None, keepdim=False, **dtype):
    dims = [d - (d < 0) for d in dim] if dim else list(range(q.ndim))
    return q._parts.sum(dims, keepdim, **dtype) if dims else q._parts.clone()


def as_strided(func, q, size, stride, offset=None):
    parts = q._parts
    if parts.stride(-1) != 1 or any(s % 4 for s in (*parts.stride()[:-1], parts.storage_offset())):
        raise NotImplementedError("as_strided of quaternions whose parts are not next to one another")
    start = None if offset is None else 4 * offset
    return func(parts, [*size, 4], [*(4 * s for s in stride), 1], start)


OPS = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default), same_parts),
    **dict.fromkeys((aten._to_copy.default, aten.empty_like.default, aten.lift_fresh.default), same_parts),
    aten.neg.default: same_parts,
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor), add),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.expand.default), to_size),
    **dict.fromkeys((aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim), by_dim),
    **dict.fromkeys((aten.select_backward.default, aten.slice_backward.default), backward_by_dim),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), total),
    aten.as_strided.default: as_strided,
}
WRITES = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.add.out: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.sub.out: aten.sub.Tensor,
    aten.neg_.default: aten.neg.default,
    aten.neg.out: aten.neg.default,
}


def run(func, args, kwargs):
    if func in OPS:
        return Quaternion.wrap(OPS[func](func, *args, **kwargs))
    target, value = kwargs.get("out", args[0] if args else None), None
    if func in WRITES:
        functional, rest = WRITES[func], {name: v for name, v in kwargs.items() if name != "out"}
        value = OPS[functional](functional, *args, **rest)
    elif func is aten.copy_.default and isinstance(args[1], Quaternion):
        value = args[1]._parts
    if value is not None and isinstance(target, Quaternion):
        target._parts.copy_(value)
        return target
    out = func.decompose(*args, **kwargs)  # in inference mode composite ops arrive whole
    if out is NotImplemented:
        raise NotImplementedError(f"Quaternion has no rule for {func}")
    return out
