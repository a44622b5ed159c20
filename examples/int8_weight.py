"""An int8 weight, declared, beside the same thing written by hand.

A matrix of int8 numbers with one scale for each row represents a matrix of floats, in a quarter of the memory.
`F.linear` multiplies with the integers and scales the result; everything else runs on the floats. The script
counts the lines of both classes, takes each the same ways, and puts both to the conformance kit.

    python examples/int8_weight.py
"""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import desugar
from subclasses import TensorSubclass, inner
from subclasses.testing import examine

# ---------------------------------------------------------------------------------------------------------
# Declared
# ---------------------------------------------------------------------------------------------------------


class Int8Weight(TensorSubclass, size_from="qdata", dtype_from="scale", fallback="materialize"):
    qdata: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()

    def materialize(self) -> Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale


@Int8Weight.implements(F.linear)
def linear(func, x, w, bias=None):
    if not isinstance(w, Int8Weight):
        return NotImplemented
    y = func(x, w.unwrap("qdata").to(x.dtype)) * w.unwrap("scale").squeeze(-1)
    return y if bias is None else y + bias


# ---------------------------------------------------------------------------------------------------------
# By hand
# ---------------------------------------------------------------------------------------------------------


class Int8ByHand(Tensor):
    @staticmethod
    def __new__(cls, qdata, scale):
        outside = {"strides": qdata.stride(), "dtype": scale.dtype, "device": qdata.device}
        return Tensor._make_wrapper_subclass(cls, qdata.shape, **outside)

    def __init__(self, qdata, scale):
        self.qdata, self.scale = qdata, scale

    def materialize(self):
        return self.qdata.to(self.scale.dtype) * self.scale

    def __repr__(self, *, tensor_contents=None):
        return f"Int8ByHand(qdata={self.qdata}, scale={self.scale})"

    def __tensor_flatten__(self):
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls(inner_tensors["qdata"], inner_tensors["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear and isinstance(args[1], cls):
            return cls.linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @staticmethod
    def linear(x, w, bias=None):
        y = F.linear(x, w.qdata.to(x.dtype)) * w.scale.squeeze(-1)
        return y if bias is None else y + bias

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            x, dtype = args[0], kwargs.pop("dtype", None)
            scale = func(x.scale, **kwargs) if dtype is None else func(x.scale, **kwargs, dtype=dtype)
            return return_and_correct_aliasing(func, args, kwargs, cls(func(x.qdata, **kwargs), scale))
        if func is aten.copy_.default and isinstance(args[1], cls):
            for name in ("qdata", "scale"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} would write to an Int8ByHand")
        plain = torch.utils._pytree.tree_map_only(cls, cls.materialize, (args, kwargs))
        return func(*plain[0], **plain[1])


torch.serialization.add_safe_globals([Int8ByHand])

# ---------------------------------------------------------------------------------------------------------
# How many lines each takes
# ---------------------------------------------------------------------------------------------------------


def count_code_lines(*parts: Any) -> int:
    """Lines of classes and functions that are neither blank nor a comment."""
    lines = [line.strip() for part in parts for line in inspect.getsource(part).splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


# ---------------------------------------------------------------------------------------------------------
# Ways to use it
# ---------------------------------------------------------------------------------------------------------

Quantize = Callable[[Tensor], Tensor]


def quantizer(cls: Any) -> Quantize:
    """A function from a matrix of floats to the class: the largest entry of each row becomes 127."""

    def quantize(w: Tensor) -> Tensor:
        scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return cls((w / scale).round().to(torch.int8), scale)

    return quantize


class Layer(nn.Module):
    """A linear layer whose weight is quantized and whose bias trains."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def same(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got, expected, atol=1e-5)


def in_eager(layer: Layer, x: Tensor) -> bool:
    return same(layer(x), F.linear(x, layer.weight.materialize(), layer.bias))


def under_torch_compile(layer: Layer, x: Tensor) -> bool:
    torch.compiler.reset()
    return same(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))


def under_desugar_compile(layer: Layer, x: Tensor) -> bool:
    return same(desugar.compile(layer, backend="eager")(x), layer(x))


def by_state_dict(layer: Layer, x: Tensor) -> bool:
    other = [Layer(quantizer(type(layer.weight))(torch.randn(layer.weight.shape))) for _ in range(2)]
    for target, assign in zip(other, (False, True), strict=True):
        target.load_state_dict(layer.state_dict(), assign=assign)
    return all(same(target(x), layer(x)) for target in other)


def by_file(layer: Layer, x: Tensor) -> bool:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    target = copy.deepcopy(layer)
    target.load_state_dict(torch.load(file, weights_only=True), assign=True)
    return type(target.weight.data) is type(layer.weight.data) and same(target(x), layer(x))


def by_deepcopy(layer: Layer, x: Tensor) -> bool:
    target = copy.deepcopy(layer)
    target.weight.qdata.zero_()
    return bool(layer.weight.qdata.any()) and not same(target(x), layer(x))


def with_an_optimizer(layer: Layer, x: Tensor) -> bool:
    """One step on all parameters: the bias moves, the quantized weight stays."""
    target, optimizer = torch.ones(len(x), len(layer.bias)), torch.optim.AdamW(layer.parameters(), lr=0.01)
    before = F.mse_loss(layer(x), target)
    before.backward()
    optimizer.step()
    return bool(F.mse_loss(layer(x), target) < before)


def with_a_trained_scale(layer: Layer, x: Tensor) -> bool:
    """The scale is a parameter of its own, and the weight is made from it in each step."""
    qdata, scale = layer.weight.qdata, nn.Parameter(layer.weight.scale.clone())
    F.linear(x, type(layer.weight.data)(qdata, scale)).square().sum().backward()
    expected = torch.autograd.grad(F.linear(x, qdata.float() * scale).square().sum(), scale)[0]
    return scale.grad is not None and torch.allclose(scale.grad, expected, rtol=1e-4)


def exported(layer: Layer, x: Tensor) -> bool:
    return same(torch.export.export(layer, (x,)).module()(x), layer(x))


def in_inference_mode(layer: Layer, x: Tensor) -> bool:
    with torch.inference_mode():
        return same(layer(x), F.linear(x, layer.weight.materialize(), layer.bias))


WAYS = {
    "eager": in_eager,
    "inference mode": in_inference_mode,
    "torch.compile": under_torch_compile,
    "desugar.compile": under_desugar_compile,
    "torch.export": exported,
    "state_dict": by_state_dict,
    "save, load(weights_only)": by_file,
    "deepcopy": by_deepcopy,
    "Parameter, optimizer": with_an_optimizer,
    "a scale that trains": with_a_trained_scale,
}


def try_ways(cls: Any) -> dict[str, str]:
    """The outcome of each way: "yes", "wrong", or the error."""
    verdicts = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        layer, x = Layer(quantizer(cls)(torch.randn(8, 16))), torch.randn(4, 16)
        try:
            verdicts[name] = "yes" if way(layer, x) else "wrong"
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            verdicts[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return verdicts


def main() -> None:
    declared, by_hand = count_code_lines(Int8Weight, linear), count_code_lines(Int8ByHand)
    print(f"{'':26}{'declared':12}by hand")
    print(f"{'code lines':26}{declared:<12}{by_hand}")
    ours, theirs = try_ways(Int8Weight), try_ways(Int8ByHand)
    for name in WAYS:
        print(f"{name:26}{ours[name]:12}{theirs[name]}")
    for cls in (Int8Weight, Int8ByHand):
        quantize = quantizer(cls)
        report = examine(lambda quantize=quantize: quantize(torch.randn(4, 6)))
        broken = f"breaks {', '.join(report.broken)}" if report.broken else "breaks none"
        print(f"{cls.__name__} keeps {len(report.of('kept'))} promises of the conformance kit, {broken}")


if __name__ == "__main__":
    main()
