"""A subclass written by hand that keeps every promise; the tests break it in one way at a time."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only


class Tagged(Tensor):
    """One tensor and a tag; every op runs on the tensor."""

    def __init_subclass__(cls):
        torch.serialization.add_safe_globals([cls])

    @staticmethod
    def __new__(cls, data_, tag="t"):
        if data_.requires_grad:
            raise NotImplementedError("Tagged: the inner tensor must not require grad; detach it")
        if type(data_) is Tensor:
            data_ = data_.resolve_conj().resolve_neg()
        return cls.wrap(data_, tag)

    @classmethod
    def wrap(cls, data_, tag, **outside):
        arguments = {"dtype": data_.dtype, "device": data_.device, "strides": data_.stride()} | outside
        x = Tensor._make_wrapper_subclass(
            cls, data_.shape, storage_offset=data_.storage_offset(), requires_grad=False, **arguments
        )
        x.data_, x.tag = data_, tag
        return x

    def materialize(self):
        return self.data_

    def __tensor_flatten__(self):
        return ["data_"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inners, tag, size, stride):
        return cls.wrap(inners["data_"], tag)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(t) and not issubclass(t, cls) for t in types):
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            return cls.run(func, args, kwargs)

    @classmethod
    def run(cls, func, args, kwargs):
        tag = next(x.tag for x in values(cls, (args, kwargs)))
        out = cls.compute(func, unwrapped(cls, args), unwrapped(cls, kwargs))
        out = tree_map_only(Tensor, lambda t: cls(t, tag), out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    @classmethod
    def compute(cls, func, args, kwargs):
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        return f"{type(self).__name__}({self.data_}, tag={self.tag!r})"

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("only leaves can be copied deeply")
        if id(self) not in memo:
            memo[id(self)] = type(self)(self.data_.clone(), self.tag).requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return type(self), (self.data_, self.tag)


torch.serialization.add_safe_globals([Tagged])


def unwrapped(cls, value):
    return tree_map_only(cls, lambda x: x.data_, value)


def values(cls, value):
    found = []
    tree_map_only(cls, found.append, value)
    return found
