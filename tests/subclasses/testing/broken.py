"""Wrongly written subclasses: each breaks ``Tagged`` in one way that people do."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.subclasses.testing.byhand import Tagged, unwrapped, values

aten = torch.ops.aten


class Computes(Tagged):
    """Computes something else in place of some ops."""

    instead: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def compute(cls, func, args, kwargs):
        return cls.instead.get(func, func)(*args, **kwargs)


class RunsAbove(Tagged):
    """Runs something else in place of some functions, above autograd."""

    instead: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return cls.instead.get(func, func)(*args, **(kwargs or {}))


class Unflattens(Tagged):
    """Makes something else of the parts."""

    unflatten: ClassVar[Any] = None

    @classmethod
    def __tensor_unflatten__(cls, inners, context, size, stride):
        return cls.wrap(*cls.unflatten(inners["data_"], context))


# ---- structure ---------------------------------------------------------------------------------------------


def made(name: str, base: type, **body: Any) -> type:
    return type(name, (base,), {"__module__": __name__, **body})


# The outside says float64.
LiesAboutDtype = made(
    "LiesAboutDtype",
    Tagged,
    wrap=classmethod(
        lambda cls, data_, tag, **outside: Tagged.wrap.__func__(
            cls, data_, tag, **({"dtype": torch.float64} | outside)
        )
    ),
)


class LooksAtData(Tagged):
    """Construction checks contents."""

    @classmethod
    def wrap(cls, data_, tag, **outside):
        if data_.numel() and bool(data_.isnan().any()):
            raise ValueError("NaN")
        return super().wrap(data_, tag, **outside)


# ---- ops ---------------------------------------------------------------------------------------------------


def differentiated(forward: Any, backward: Any) -> Any:
    """An autograd function of two functions."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Differentiated", (torch.autograd.Function,), parts)


# Dropout whose backward draws another mask.
DrawsAgain = differentiated(
    lambda ctx, x: type(x)(x.detach().data_ * (torch.rand(x.shape) < 0.5), x.tag),
    lambda ctx, grad: grad * (torch.rand(grad.shape) < 0.5),
)


class LooksAtGradMode(Tagged):
    """A rule computes something else while gradients are recorded."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.sigmoid.default and values(cls, args)[0].requires_grad:
            return cls(torch.relu(args[0].data_), args[0].tag)
        return super().__torch_dispatch__(func, types, args, kwargs)


# A class attribute holds the arguments of a call while other threads may run.
SharesScratch = made(
    "SharesScratch",
    Tagged,
    compute=classmethod(
        lambda cls, func, args, kwargs: (
            setattr(cls, "scratch", args),
            time.sleep(0.0005),
            func(*cls.scratch, **kwargs),
        )[-1]
    ),
)


def without_grad(data_: Tensor) -> Tensor:
    if data_.requires_grad:
        raise NotImplementedError("the inner tensor must not require grad")
    return data_


# Inner tensors with a conjugate bit are read raw.
KeepsLazyBits = made(
    "KeepsLazyBits", Tagged, __new__=lambda cls, data_, tag="t": cls.wrap(without_grad(data_), tag)
)


class TakesStrangers(Tagged):
    """Whatever is not of the class is taken for plain."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch.inference_mode(False), torch.no_grad():
            return cls.run(func, args, kwargs or {})


# ---- views and writing -------------------------------------------------------------------------------------


class NoAliasing(Tagged):
    """A view gets a storage of its own."""

    @classmethod
    def run(cls, func, args, kwargs):
        if func in (aten.view.default, aten.slice.Tensor, aten.transpose.int):
            return cls(func(*unwrapped(cls, args), **kwargs), values(cls, args)[0].tag)
        return super().run(func, args, kwargs)


class WritesThroughCopies(Tagged):
    """A view of rows is a copy, so what is written to it is lost."""

    @classmethod
    def run(cls, func, args, kwargs):
        out = super().run(func, args, kwargs)
        if func is aten.slice.Tensor:
            out.data_ = out.data_.clone()
        return out


# ``t_`` changes the inner tensor and leaves the outside as it was.
IgnoresMetadataMutation = made(
    "IgnoresMetadataMutation",
    Tagged,
    run=classmethod(
        lambda cls, func, args, kwargs: (
            (args[0].data_.t_(), args[0])[1]
            if func is aten.t_.default
            else Tagged.run.__func__(cls, func, args, kwargs)
        )
    ),
)
# Keeps its input on ``ctx`` where no version counter is looked at.
IgnoresVersions = differentiated(
    lambda ctx, x: (setattr(ctx, "x", x.detach()), x.detach() * x.detach())[1],
    lambda ctx, grad: grad * 2 * ctx.x,
)


# ---- copies and gradients ----------------------------------------------------------------------------------


# `detach` gives a plain tensor.
DetachesToPlain = made(
    "DetachesToPlain",
    Tagged,
    run=classmethod(
        lambda cls, func, args, kwargs: (
            args[0].data_.detach()
            if func is aten.detach.default
            else Tagged.run.__func__(cls, func, args, kwargs)
        )
    ),
)


# ``linear`` whose gradient forgets the argument's scale.
WrongBackward = differentiated(
    lambda ctx, x, w: (ctx.save_for_backward(x), F.linear(x, w.detach().data_))[1],
    lambda ctx, grad: (None, 2 * grad.t() @ ctx.saved_tensors[0]),
)


# A backward that writes into the cotangent that it was given.
WritesCotangent = differentiated(lambda ctx, x: x.detach().clone(), lambda ctx, grad: grad.mul_(1.5))


# ---- compilers ---------------------------------------------------------------------------------------------


class CountsCalls(Tagged):
    """State outside the inner tensors: the result of an op depends on how often it ran."""

    calls = 0

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.exp.default:
            cls.calls += 1
            return func(*args) * (1 if torch.is_inference_mode_enabled() or type(args[0]) is Tensor else 2)
        return func(*args, **kwargs)


class SaysNoOffset(Tagged):
    """The outside never has a storage offset."""

    @classmethod
    def wrap(cls, data_, tag, **outside):
        x = Tensor._make_wrapper_subclass(cls, data_.shape, dtype=data_.dtype, strides=data_.stride())
        x.data_, x.tag = data_, tag
        return x


# Every metadata is as good as any other to the compiler.
GuardsNothing = made(
    "GuardsNothing",
    Tagged,
    __metadata_guard__=classmethod(lambda cls, saved, now: True),
    run=classmethod(
        lambda cls, func, args, kwargs: (
            args[0].clone()
            if func is aten.neg.default and args[0].tag == "v"
            else Tagged.run.__func__(cls, func, args, kwargs)
        )
    ),
)


def compute_with_plain(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if any(type(a) is not Tensor and isinstance(a, Tensor) for a in args):
        raise AssertionError("expected a plain tensor inside")
    return func(*args, **kwargs)


# Only an exact ``torch.Tensor`` may be inside.
WantsPlainInside = made(
    "WantsPlainInside",
    Tagged,
    __new__=lambda cls, data_, tag="t": cls.wrap(without_grad(data_).resolve_conj().resolve_neg(), tag),
    compute=classmethod(compute_with_plain),
)


# ---- all of them, with the promise that each breaks ----------------------------------------------------------


def computes(name: str, instead: dict[Any, Any]) -> type:
    return made(name, Computes, instead=instead)


def linear_with_wrong_gradient(x: Tensor, w: Tensor, *more: Any, **options: Any) -> Tensor:
    if isinstance(w, Tagged) and w.requires_grad:
        return WrongBackward.apply(x, w)
    return F.linear(x, w, *more, **options)


def raising(error: Exception) -> Any:
    def raises(*args: Any, **options: Any) -> Any:
        raise error

    return raises


def same_mask(x: Tensor, **options: Any) -> Tensor:
    """Random ops seed themselves."""
    torch.manual_seed(7)
    return aten.rand_like.default(x, **options)


def fill_and_refuse(x: Tensor, value: Any) -> None:
    x.fill_(value)
    raise NotImplementedError("fill_ is not supported")


# An op that the class does not have ends in an internal error instead of a refusal.
RaisesTypeErrors = computes(
    "RaisesTypeErrors", {aten._softmax.default: raising(KeyError("not an op that I know"))}
)
# The tag is neither an inner tensor nor in the context.
ForgetsTag = made(
    "ForgetsTag",
    Unflattens,
    unflatten=staticmethod(lambda data_, context: (data_, "lost")),
    materialize=lambda self: self.data_ if self.tag == "t" else -self.data_,
    __tensor_flatten__=lambda self: (["data_"], None),
)
# `copy_` does nothing, so `load_state_dict` loads nothing.
LoadsNothing = computes("LoadsNothing", {aten.copy_.default: lambda x, *args: x})
# The outer size rides in the context.
SizeInContext = made(
    "SizeInContext",
    Unflattens,
    unflatten=staticmethod(lambda data_, context: (data_.view(context[1]), context[0])),
    __tensor_flatten__=lambda self: (["data_"], (self.tag, tuple(self.data_.shape))),
)
# Pickling loses the metadata.
PicklesNoTag = made(
    "PicklesNoTag", Tagged, __reduce_ex__=lambda self, protocol: (type(self), (self.data_, "lost"))
)
GENERATOR = torch.Generator().manual_seed(0)

WRONG = {
    ForgetsTag: "round_trip",
    # Flatten names an attribute that is not a tensor.
    made("NamesNoTensor", Tagged, __tensor_flatten__=lambda self: (["data_", "tag"], self.tag)): "flatten",
    made(
        "CopiesOnUnflatten",
        Unflattens,
        unflatten=staticmethod(lambda data_, tag: (data_.clone(), tag)),
    ): "round_trip",
    # Unflatten assumes a contiguous tensor.
    made(
        "LosesStride",
        Tagged,
        __tensor_unflatten__=classmethod(
            lambda cls, inners, tag, size, stride: cls.wrap(
                inners["data_"], tag, strides=torch.empty(size, device="meta").stride()
            )
        ),
    ): "round_trip",
    # The context is an object that equals nothing but itself.
    made(
        "ObjectContext",
        Unflattens,
        unflatten=staticmethod(lambda data_, context: (data_, context[1])),
        __tensor_flatten__=lambda self: (["data_"], [object(), self.tag]),
    ): "metadata",
    # A tensor rides in the context.
    made(
        "TensorContext",
        Unflattens,
        unflatten=staticmethod(lambda data_, context: (data_, context[0])),
        __tensor_flatten__=lambda self: (["data_"], (self.tag, self.data_.amax())),
    ): "metadata",
    SizeInContext: "sizes",
    LiesAboutDtype: "outside",
    LooksAtData: "without_data",
    # `repr` looks at a number.
    made(
        "PrintsData",
        Tagged,
        __repr__=lambda self, **_: f"Tagged(first={self.data_.flatten()[0].item():.2f})",
    ): "printing",
    # Division multiplies.
    computes("WrongScale", {aten.div.Tensor: aten.mul.Tensor}): "values",
    RaisesTypeErrors: "values",
    # A rule for `mm` and `addmm`, which `linear` is not made of in inference mode.
    computes(
        "KnowsNoComposite",
        dict.fromkeys(
            (aten.linear.default, aten.matmul.default), raising(RuntimeError("not an op that I know"))
        ),
    ): "inference_mode",
    LooksAtGradMode: "grad_mode",
    SharesScratch: "threads",
    # A matrix product brings one of its arguments to float32, whatever the other one is.
    computes(
        "AssumesFloat32",
        {aten.mm.default: lambda x, y: aten.mm.default(x, y.float() if x.is_floating_point() else y)},
    ): "autocast",
    # Random ops draw from a generator of the class.
    computes(
        "OwnGenerator",
        {aten.rand_like.default: lambda x, **_: torch.rand(x.shape, generator=GENERATOR)},
    ): "randomness",
    computes("SameMask", {aten.rand_like.default: same_mask}): "randomness",
    KeepsLazyBits: "lazy_bits",
    TakesStrangers: "strangers",
    NoAliasing: "views",
    # A result that claims to be a view holds a copy.
    computes("CopiesForViews", {aten.slice.Tensor: lambda *args: aten.slice.Tensor(*args).clone()}): "views",
    # An in-place op writes to a copy.
    computes("LosesWrites", {aten.add_.Tensor: lambda x, y, **_: x + y}): "mutation",
    # A refusal comes after the value has changed.
    computes("RefusesTooLate", {aten.fill_.Scalar: fill_and_refuse}): "mutation",
    WritesThroughCopies: "writes_to_views",
    IgnoresMetadataMutation: "mutation",
    # `x * x` runs above autograd and keeps `x` unsaved.
    made(
        "Stale",
        RunsAbove,
        instead={Tensor.mul: lambda x, y: IgnoresVersions.apply(x) if x is y else x * y},
    ): "stale_gradients",
    # `clone` gives an alias.
    computes("ClonesItself", {aten.clone.default: lambda x, **_: x.detach()}): "clone_and_detach",
    DetachesToPlain: "parameter",
    # `deepcopy` shares the inner tensor.
    made(
        "SharesOnDeepcopy",
        Tagged,
        __deepcopy__=lambda self, memo: memo.setdefault(
            id(self), type(self)(self.data_, self.tag).requires_grad_(self.requires_grad)
        ),
    ): "deepcopy",
    PicklesNoTag: "serialization",
    # `.to(dtype)` changes nothing, silently.
    computes("IgnoresDtype", {aten._to_copy.default: lambda x, **_: aten._to_copy.default(x)}): "conversion",
    LoadsNothing: "parameter",
    # `add_` forgets its `alpha`, with which an optimizer says how far to go.
    computes("StepsBackwards", {aten.add_.Tensor: lambda x, y, **_: aten.add_.Tensor(x, y)}): "optimizer",
    # The forward and the backward of dropout disagree.
    made(
        "TwoMasks", RunsAbove, instead={F.dropout: lambda x, *_, **__: DrawsAgain.apply(x)}
    ): "random_backward",
    # An op that few people call is wrong.
    computes("WrongRareOp", {aten.erfinv.default: lambda x: aten.erfinv.default(x) + 1}): "op_infos_agree",
    # An inner tensor that requires grad is kept as it is.
    made(
        "HoldsGrad", Tagged, __new__=lambda cls, data_, tag="t": cls.wrap(data_, tag)
    ): "inner_requires_grad",
    # An inner tensor that requires grad is detached, silently.
    made(
        "DropsGrad",
        Tagged,
        __new__=lambda cls, data_, tag="t": cls.wrap(data_.detach().resolve_neg(), tag),
    ): "inner_requires_grad",
    # A rule above autograd with a wrong gradient.
    made("WrongGradient", RunsAbove, instead={F.linear: linear_with_wrong_gradient}): "gradients",
    # A rule above autograd that reads the raw inner tensor: its result does not require grad.
    made("NoGradient", RunsAbove, instead={Tensor.exp: lambda x: type(x)(x.data_.exp(), x.tag)}): "gradients",
    # The backward of `neg` writes into the caller's gradient.
    made("ChangesCotangent", RunsAbove, instead={Tensor.neg: WritesCotangent.apply}): "cotangents",
    WantsPlainInside: "nested_inside",
}
WRONG_COMPILED = {
    # A rule turns a size into a Python int, so that each size is a program of its own.
    computes(
        "FixesSizes",
        {aten.neg.default: lambda x: x * torch.full((int(x.shape[0]), 1), -1.0)},
    ): "dynamic_shapes",
    SaysNoOffset: "compiled_offsets",
    CountsCalls: "compiled_values",
    GuardsNothing: "metadata_guard",
}
