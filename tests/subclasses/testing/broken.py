"""Wrongly written subclasses: each breaks ``Tagged`` in one way that people do."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.subclasses.testing.byhand import Tagged, unwrapped, values

aten = torch.ops.aten


# ---- structure ---------------------------------------------------------------------------------------------


class ForgetsTag(Tagged):
    """The tag is neither an inner tensor nor in the context."""

    def materialize(self):
        return self.data_ if self.tag == "t" else -self.data_

    def __tensor_flatten__(self):
        return ["data_"], None

    @classmethod
    def __tensor_unflatten__(cls, inners, tag, size, stride):
        return cls.wrap(inners["data_"], "lost")


class NamesNoTensor(Tagged):
    """Flatten names an attribute that is no tensor."""

    def __tensor_flatten__(self):
        return ["data_", "tag"], self.tag


class CopiesOnUnflatten(Tagged):
    """Unflatten makes copies."""

    @classmethod
    def __tensor_unflatten__(cls, inners, tag, size, stride):
        return cls.wrap(inners["data_"].clone(), tag)


class LosesStride(Tagged):
    """Unflatten assumes a contiguous tensor."""

    @classmethod
    def __tensor_unflatten__(cls, inners, tag, size, stride):
        contiguous = torch.empty(size, device="meta").stride()
        return cls.wrap(inners["data_"], tag, strides=contiguous)


class ObjectContext(Tagged):
    """The context is an object that equals nothing but itself."""

    def __tensor_flatten__(self):
        return ["data_"], [object(), self.tag]

    @classmethod
    def __tensor_unflatten__(cls, inners, context, size, stride):
        return cls.wrap(inners["data_"], context[1])


class TensorContext(Tagged):
    """A tensor rides in the context."""

    def __tensor_flatten__(self):
        return ["data_"], (self.tag, self.data_.amax())

    @classmethod
    def __tensor_unflatten__(cls, inners, context, size, stride):
        return cls.wrap(inners["data_"], context[0])


class SizeInContext(Tagged):
    """The outer size rides in the context."""

    def __tensor_flatten__(self):
        return ["data_"], (self.tag, tuple(self.data_.shape))

    @classmethod
    def __tensor_unflatten__(cls, inners, context, size, stride):
        return cls.wrap(inners["data_"].view(context[1]), context[0])


class LiesAboutDtype(Tagged):
    """The outside says float64."""

    @classmethod
    def wrap(cls, data_, tag, **outside):
        return super().wrap(data_, tag, **({"dtype": torch.float64} | outside))


class LooksAtData(Tagged):
    """Construction checks contents."""

    @classmethod
    def wrap(cls, data_, tag, **outside):
        if data_.numel() and bool(data_.isnan().any()):
            raise ValueError("NaN")
        return super().wrap(data_, tag, **outside)


class PrintsData(Tagged):
    """``repr`` looks at a number."""

    def __repr__(self, *, tensor_contents=None):
        return f"Tagged(first={self.data_.flatten()[0].item():.2f})"


# ---- ops ---------------------------------------------------------------------------------------------------


class WrongScale(Tagged):
    """Division multiplies."""

    @classmethod
    def compute(cls, func, args, kwargs):
        return (aten.mul.Tensor if func is aten.div.Tensor else func)(*args, **kwargs)


class RaisesTypeErrors(Tagged):
    """An op that the class does not have ends in an internal error instead of a refusal."""

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten._softmax.default:
            raise KeyError(func)
        return func(*args, **kwargs)


class KnowsNoComposite(Tagged):
    """A rule for ``mm`` and ``addmm``, which ``linear`` is not made of in inference mode."""

    @classmethod
    def compute(cls, func, args, kwargs):
        if func in (aten.linear.default, aten.matmul.default):
            raise RuntimeError(f"{func} is not an op that I know")
        return func(*args, **kwargs)


class WrongRareOp(Tagged):
    """An op that few people call is wrong."""

    @classmethod
    def compute(cls, func, args, kwargs):
        return func(*args, **kwargs) + 1 if func is aten.erfinv.default else func(*args, **kwargs)


class DrawsAgain(torch.autograd.Function):
    """Dropout whose backward draws another mask."""

    @staticmethod
    def forward(ctx, x):
        return type(x)(x.detach().data_ * (torch.rand(x.shape) < 0.5), x.tag)

    @staticmethod
    def backward(ctx, grad):
        return grad * (torch.rand(grad.shape) < 0.5)


class TwoMasks(Tagged):
    """The forward and the backward of dropout disagree."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.dropout:
                return DrawsAgain.apply(args[0])
            return func(*args, **(kwargs or {}))


class LooksAtGradMode(Tagged):
    """A rule computes something else while gradients are recorded."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.sigmoid.default and values(cls, args)[0].requires_grad:
            return cls(torch.relu(args[0].data_), args[0].tag)
        return super().__torch_dispatch__(func, types, args, kwargs)


class SharesScratch(Tagged):
    """What a call works on waits on the class while other threads may run."""

    @classmethod
    def compute(cls, func, args, kwargs):
        cls.scratch = args
        time.sleep(0.0005)
        return func(*cls.scratch, **kwargs)


class AssumesFloat32(Tagged):
    """A matrix product brings one of its arguments to float32, whatever the other one is."""

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.mm.default and args[0].is_floating_point():
            args = [args[0], args[1].float()]
        return func(*args, **kwargs)


class OwnGenerator(Tagged):
    """Random ops draw from a generator of the class."""

    generator = torch.Generator().manual_seed(0)

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.rand_like.default:
            return torch.rand(args[0].shape, generator=cls.generator)
        return func(*args, **kwargs)


class SameMask(Tagged):
    """Random ops seed themselves."""

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.rand_like.default:
            torch.manual_seed(7)
        return func(*args, **kwargs)


class KeepsLazyBits(Tagged):
    """Inner tensors with a conjugate bit are read raw."""

    @staticmethod
    def __new__(cls, data_, tag="t"):
        if data_.requires_grad:
            raise NotImplementedError("the inner tensor must not require grad")
        return cls.wrap(data_, tag)


class TakesStrangers(Tagged):
    """Whatever is not of the class is taken for plain."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch.inference_mode(False), torch.no_grad():
            return cls.run(func, args, kwargs or {})


# ---- views and writing -------------------------------------------------------------------------------------


def wrapped(cls, args, out):
    return cls(out, values(cls, args)[0].tag) if isinstance(out, Tensor) else out


class NoAliasing(Tagged):
    """A view gets a storage of its own."""

    @classmethod
    def run(cls, func, args, kwargs):
        if func in (aten.view.default, aten.slice.Tensor, aten.transpose.int):
            return wrapped(cls, args, func(*unwrapped(cls, args), **kwargs))
        return super().run(func, args, kwargs)


class CopiesForViews(Tagged):
    """What claims to be a view holds a copy."""

    @classmethod
    def compute(cls, func, args, kwargs):
        out = func(*args, **kwargs)
        return out.clone() if func is aten.slice.Tensor else out


class LosesWrites(Tagged):
    """An in-place op writes to a copy."""

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.add_.Tensor:
            return args[0] + args[1]
        return func(*args, **kwargs)


class RefusesTooLate(Tagged):
    """A refusal comes after the value has changed."""

    @classmethod
    def compute(cls, func, args, kwargs):
        out = func(*args, **kwargs)
        if func is aten.fill_.Scalar:
            raise NotImplementedError("fill_ is not supported")
        return out


class WritesThroughCopies(Tagged):
    """A view of rows is a copy, so what is written to it is lost."""

    @classmethod
    def run(cls, func, args, kwargs):
        out = super().run(func, args, kwargs)
        if func is aten.slice.Tensor:
            out.data_ = out.data_.clone()
        return out


class IgnoresMetadataMutation(Tagged):
    """``t_`` changes the inner tensor and leaves the outside as it was."""

    @classmethod
    def run(cls, func, args, kwargs):
        if func is aten.t_.default:
            args[0].data_.t_()
            return args[0]
        return super().run(func, args, kwargs)


class IgnoresVersions(torch.autograd.Function):
    """Keeps its input on ``ctx`` where no version counter is looked at."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x.detach() * x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.x


class Stale(Tagged):
    """``x * x`` runs above autograd and keeps ``x`` unsaved."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.mul and args[0] is args[1]:
                return IgnoresVersions.apply(args[0])
            return func(*args, **(kwargs or {}))


# ---- copies ------------------------------------------------------------------------------------------------


class ClonesItself(Tagged):
    """``clone`` gives an alias."""

    @classmethod
    def compute(cls, func, args, kwargs):
        return args[0].detach() if func is aten.clone.default else func(*args, **kwargs)


class DetachesToPlain(Tagged):
    """``detach`` gives a plain tensor."""

    @classmethod
    def run(cls, func, args, kwargs):
        if func is aten.detach.default:
            return args[0].data_.detach()
        return super().run(func, args, kwargs)


class SharesOnDeepcopy(Tagged):
    """``deepcopy`` shares the inner tensor."""

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), type(self)(self.data_, self.tag).requires_grad_(self.requires_grad))


class PicklesNoTag(Tagged):
    """Pickling loses the metadata."""

    def __reduce_ex__(self, protocol):
        return type(self), (self.data_, "lost")


class IgnoresDtype(Tagged):
    """``.to(dtype)`` changes nothing, silently."""

    @classmethod
    def compute(cls, func, args, kwargs):
        return func(*args, **({} if func is aten._to_copy.default else kwargs))


class LoadsNothing(Tagged):
    """``copy_`` does nothing, so ``load_state_dict`` loads nothing."""

    @classmethod
    def compute(cls, func, args, kwargs):
        return args[0] if func is aten.copy_.default else func(*args, **kwargs)


class StepsBackwards(Tagged):
    """``add_`` forgets its ``alpha``, with which an optimizer says how far to go."""

    @classmethod
    def compute(cls, func, args, kwargs):
        return func(*args, **({} if func is aten.add_.Tensor else kwargs))


# ---- gradients ---------------------------------------------------------------------------------------------


class HoldsGrad(Tagged):
    """An inner tensor that requires grad is kept as it is."""

    @staticmethod
    def __new__(cls, data_, tag="t"):
        return cls.wrap(data_, tag)


class DropsGrad(Tagged):
    """An inner tensor that requires grad is detached, silently."""

    @staticmethod
    def __new__(cls, data_, tag="t"):
        return cls.wrap(data_.detach().resolve_neg(), tag)


class WrongBackward(torch.autograd.Function):
    """``linear`` whose gradient forgets the argument's scale."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return F.linear(x, w.detach().data_)

    @staticmethod
    def backward(ctx, grad):
        return None, 2 * grad.t() @ ctx.saved_tensors[0]


class WrongGradient(Tagged):
    """A rule above autograd with a wrong gradient."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and isinstance(args[1], cls) and args[1].requires_grad:
                return WrongBackward.apply(args[0], args[1])
            return func(*args, **(kwargs or {}))


class NoGradient(Tagged):
    """A rule above autograd that reads the raw inner tensor: its result does not require grad."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.exp:
                return cls(args[0].data_.exp(), args[0].tag)
            return func(*args, **(kwargs or {}))


class WritesCotangent(torch.autograd.Function):
    """A backward that writes into the cotangent that it was given."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(1.5)


class ChangesCotangent(Tagged):
    """``sigmoid`` whose backward writes into the caller's gradient."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.neg:
                return WritesCotangent.apply(args[0])
            return func(*args, **(kwargs or {}))


# ---- compilers ---------------------------------------------------------------------------------------------


class CountsCalls(Tagged):
    """State outside the inner tensors: what an op gives depends on how often it ran."""

    calls = 0

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.exp.default:
            cls.calls += 1
            return func(*args) * (1 if torch.is_inference_mode_enabled() or type(args[0]) is Tensor else 2)
        return func(*args, **kwargs)


class FixesSizes(Tagged):
    """A rule turns a size into a Python int, so that each size is a program of its own."""

    @classmethod
    def compute(cls, func, args, kwargs):
        if func is aten.neg.default:
            return args[0] * torch.full((int(args[0].shape[0]), 1), -1.0)
        return func(*args, **kwargs)


class SaysNoOffset(Tagged):
    """The outside never has a storage offset."""

    @classmethod
    def wrap(cls, data_, tag, **outside):
        x = Tensor._make_wrapper_subclass(cls, data_.shape, dtype=data_.dtype, strides=data_.stride())
        x.data_, x.tag = data_, tag
        return x


class GuardsNothing(Tagged):
    """Every metadata is as good as any other to the compiler."""

    @classmethod
    def __metadata_guard__(cls, saved, now):
        return True

    @classmethod
    def run(cls, func, args, kwargs):
        out = super().run(func, args, kwargs)
        if func is aten.neg.default and args[0].tag == "v":
            return args[0].clone()
        return out


class WantsPlainInside(Tagged):
    """Only an exact ``torch.Tensor`` may be inside."""

    @staticmethod
    def __new__(cls, data_, tag="t"):
        if data_.requires_grad:
            raise NotImplementedError("the inner tensor must not require grad")
        return cls.wrap(data_.resolve_conj().resolve_neg(), tag)

    @classmethod
    def compute(cls, func, args, kwargs):
        if any(type(a) is not Tensor and isinstance(a, Tensor) for a in args):
            raise AssertionError("expected a plain tensor inside")
        return func(*args, **kwargs)
