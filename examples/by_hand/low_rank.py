"""`classes/low_rank.py` without the library: the same class, written by hand on PyTorch alone.

A gradient that reaches the factors of a matrix is a pair of gradients. A `LowRank` marked as a cotangent carries the
pair, and adds factor by factor. Any other op of autograd makes a plain gradient, from which the chain rule computes the
gradients of the factors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten


class LowRank(Tensor):
    """`left @ right`."""

    left: Tensor  # [n, r]
    right: Tensor  # [r, m]
    is_cotangent: bool
    primal = None  # of a cotangent, the factors of the matrix that it belongs to

    @staticmethod
    def __new__(cls, left, right):
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            raise ValueError(f"factors of sizes {list(left.shape)} and {list(right.shape)}")
        if left.device != right.device:
            raise ValueError(f"factors on {left.device} and {right.device}")
        left, right = (t.resolve_conj().resolve_neg() if type(t) is Tensor else t for t in (left, right))
        if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            return Construct.apply(left, right, False)
        return cls.wrap(left.detach(), right.detach())

    @classmethod
    def wrap(cls, left, right, is_cotangent=False):
        size = (left.shape[0], right.shape[1])
        self = Tensor._make_wrapper_subclass(cls, size, dtype=left.dtype, device=left.device)
        self.left, self.right, self.is_cotangent = left, right, is_cotangent
        return self

    def __tensor_flatten__(self):
        return ["left", "right"], self.is_cotangent

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, is_cotangent, outer_size, outer_stride):
        return cls.wrap(inner_tensors["left"], inner_tensors["right"], is_cotangent)

    def __coerce_tangent_metadata__(self):
        return LowRank.wrap(self.left, self.right, is_cotangent=True)

    def __coerce_same_metadata_as_tangent__(self, is_cotangent, expected_type=None):
        if expected_type in (None, LowRank):
            return LowRank.wrap(self.left, self.right, is_cotangent)
        return None

    def __repr__(self, *, tensor_contents=None):
        return f"LowRank(left={self.left!r}, right={self.right!r})"

    def __reduce_ex__(self, protocol):
        return rebuild, (self.left, self.right, self.is_cotangent, self.requires_grad)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("only leaves can be copied deeply")
        if id(self) not in memo:
            factors = self.left.clone(), self.right.clone()
            memo[id(self)] = rebuild(*factors, self.is_cotangent, self.requires_grad)
        return memo[id(self)]

    def materialize(self) -> Tensor:
        left, right = unwrap(self)
        return left @ right

    @classmethod
    def nearest(cls, matrix: Tensor, rank: int) -> "LowRank":
        """The matrix of this rank with the least squared error."""
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return cls(u[:, :rank] * s[:rank], vh[:rank])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and "out" not in kwargs:
            return matmul(*args, **kwargs)
        if func is F.linear:
            return linear(*args, **kwargs)
        if func is Tensor.__setitem__:
            raise NotImplementedError("x[...] = value would write to a LowRank, or to its matrix")
        if (
            func in VIEWS
        ):  # of the matrix, which is a new tensor: below autograd it would count as a view of this
            args, kwargs = tree_map_only(LowRank, LowRank.materialize, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, LowRank)]
        known = {type(t) for w in operands for t in (w, w.left, w.right)}
        if any(is_traceable_wrapper_subclass_type(t) and t not in known for t in types):
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            return run(func, operands, args, kwargs or {})


def unwrap(w: LowRank) -> tuple[Tensor, Tensor]:
    """The factors, as differentiable functions of the matrix."""
    recorded = w.requires_grad and torch.is_grad_enabled()
    return Unwrap.apply(w) if recorded else (w.left, w.right)


def rebuild(left, right, is_cotangent, requires_grad):
    return LowRank.wrap(left, right, is_cotangent).requires_grad_(requires_grad)


torch.serialization.add_safe_globals([rebuild])


@torch._dynamo.allow_in_graph
class Construct(torch.autograd.Function):
    """The matrix as a function of its factors."""

    @staticmethod
    def forward(ctx, left, right, is_cotangent):
        ctx.save_for_backward(left, right)
        return LowRank.wrap(left.detach(), right.detach(), is_cotangent)

    @staticmethod
    def backward(ctx, g):
        if isinstance(g, LowRank):
            return *unwrap(g), None
        return *pull_back(g, *ctx.saved_tensors), None


@torch._dynamo.allow_in_graph
class Unwrap(torch.autograd.Function):
    """The factors as functions of the matrix."""

    @staticmethod
    def forward(ctx, w):
        ctx.primal = (w.left, w.right) if type(w.left) is Tensor else None  # a trace has no use for it
        return w.left.view_as(w.left), w.right.view_as(w.right)

    @staticmethod
    def backward(ctx, left, right):
        cotangent = Construct.apply(left, right, True)
        cotangent.primal = ctx.primal
        return cotangent


def pull_back(g, left, right):
    """The gradients of the factors, from the gradient of the matrix."""
    return g @ right.mH, left.mH @ g


# ---- rules -------------------------------------------------------------------------------------------------

VIEWS = {
    getattr(home, name)
    for home in (torch, Tensor, aten)
    for name in (
        "view view_as reshape reshape_as transpose swapaxes t permute movedim unsqueeze squeeze expand expand_as "
        "split chunk unbind select narrow diagonal flatten unflatten ravel unfold as_strided __getitem__"
    ).split()
    if hasattr(home, name)
} | {getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "real", "imag")}
VIEWS |= {aten.numpy_T, aten.matrix_H, aten.mT, aten.mH}  # newer releases of Dynamo call these for attributes


def matmul(x, y):
    if not isinstance(x, LowRank):
        left, right = unwrap(y)
        return (x @ left) @ right
    left, right = unwrap(x)
    if not isinstance(y, LowRank):
        return left @ (right @ y)
    other_left, other_right = unwrap(y)
    middle = right @ other_left  # goes to the side where it makes the smaller rank
    if left.shape[1] < other_left.shape[1]:
        return LowRank(left, middle @ other_right)
    return LowRank(left @ middle, other_right)


def linear(input, weight, bias=None):
    if not isinstance(weight, LowRank) or isinstance(input, LowRank):
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(input, weight, bias)
    left, right = unwrap(weight)
    return F.linear(F.linear(input, right), left, bias)


STRUCTURAL = {
    *(aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default),
    *(aten.empty_like.default, aten.lift_fresh.default),
}
LINEAR = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.zeros_like.default),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
}


def run(func, operands, args, kwargs):
    """An op below autograd: on each factor, or on the matrix."""
    if func is aten.copy_.default and all(isinstance(t, LowRank) for t in args[:2]):
        for t, source in zip((args[0].left, args[0].right), (args[1].left, args[1].right), strict=True):
            t.copy_(source)
        return args[0]
    cotangents, dtype = [w for w in operands if w.is_cotangent], kwargs.get("dtype")
    if cotangents and func not in STRUCTURAL:
        return on_cotangents(func, cotangents[0].primal, args, kwargs)
    if func in STRUCTURAL and (dtype is None or dtype.is_floating_point or dtype.is_complex):
        out = on_factors(func, bool(cotangents), args, kwargs)
        return return_and_correct_aliasing(func, args, kwargs, out)
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            if any(isinstance(t, LowRank) for t in tree_leaves(written)):
                raise NotImplementedError(f"{func} would write to a LowRank")
    args, kwargs = tree_map_only(LowRank, LowRank.materialize, (args, kwargs))
    return func(*args, **kwargs)


def on_factors(func, is_cotangent, args, kwargs):
    lefts, rights = (tree_map_only(LowRank, lambda w, i=i: (w.left, w.right)[i], args) for i in (0, 1))
    return LowRank.wrap(func(*lefts, **kwargs), func(*rights, **kwargs), is_cotangent)


def on_cotangents(func, primal, args, kwargs):
    if func is aten.add.Tensor and primal is not None:  # one of two may be plain, if an op made it
        args = [g if isinstance(g, LowRank) else LowRank.wrap(*pull_back(g, *primal), True) for g in args]
    if func not in LINEAR or any(isinstance(t, Tensor) and t.ndim and type(t) is not LowRank for t in args):
        raise NotImplementedError(f"{func} on a gradient of a LowRank; read its factors instead")
    out = on_factors(func, True, args, kwargs)
    out.primal = primal
    return out
