"""The classes of the scoreboard, and a short program for each promise that one of them breaks.

A program needs nothing of this project: the lines of its class, which make a value `w`, and lines that fail. A test
runs each where its library is installed, and compares the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Reproduction:
    """Lines that fail for a value `w`, and a pattern of the error."""

    code: str
    error: str


@dataclass(frozen=True)
class Subject:
    """A class of the scoreboard.

    Attributes:
        name: the name of the class.
        library: the module that has to be installed.
        setup: the lines that make a value `w`.
        reference: returns the plain tensor, or tensors, that a value represents.
        reproductions: for each promise that the class breaks, lines that show it.
        ours: whether the class is of this project.
        options: further options of the kit.
    """

    name: str
    library: str
    setup: str
    reference: Callable[[Any], Any]
    reproductions: dict[str, Reproduction] = field(default_factory=dict)
    ours: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def program(self, promise: str) -> str:
        """Returns the whole program that shows a broken promise."""
        return f"import torch\n{self.setup}\n{self.reproductions[promise].code}"

    def make(self) -> Any:
        """Returns a new value."""
        return run_program(f"import torch\n{self.setup}")["w"]


def run_program(program: str) -> dict[str, Any]:
    """Runs lines of this file, and returns the names that they bind."""
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    return names


# ---- faults that several classes have ----------------------------------------------------------------------

VIEW_IN_INFERENCE_MODE = Reproduction(
    "with torch.inference_mode():\n    w[:1]", "RuntimeError: Cannot set version_counter for inference tensor"
)
TRANSPOSED_IN_INFERENCE_MODE = Reproduction(
    "with torch.inference_mode():\n    w.t()", "RuntimeError: Cannot set version_counter for inference tensor"
)
COPY_OF_PLAIN = Reproduction(
    "w.copy_(torch.ones(w.shape))", "AttributeError: 'Tensor' object has no attribute 'qdata'"
)
DTYPE_LEFT_OUT = Reproduction("assert w.to(torch.float64).dtype == torch.float64", "AssertionError")
NO_GRADIENT = Reproduction(
    "w.requires_grad_()\nassert torch.nn.functional.linear(torch.randn(2, w.shape[1]), w).requires_grad",
    "AssertionError",
)
NO_ALIAS = Reproduction("assert torch._C._is_alias_of(w, w.t())", "AssertionError")
NARROW = Reproduction("w.narrow(-1, 0, 1)", "UnboundLocalError: .*'sliced_scale'")
GRANULARITY = "from torchao.quantization.granularity import PerRow\n"


def dequantized(w: Any) -> Any:
    """Returns the floats that a quantized value represents."""
    return w.dequantize()


def _keyed(values: Any, offsets: Any, weights: Any) -> Any:
    from subclasses.keyed import KeyedJaggedTensor

    return KeyedJaggedTensor(
        list("abc"), values, offsets.diff(dim=1).flatten(), weights=weights, max_length=3
    )


# ---- the classes -------------------------------------------------------------------------------------------

OTHERS = [
    Subject(
        "Int8Tensor",
        "torchao",
        f"from torchao.quantization import Int8Tensor\n{GRANULARITY}"
        "w = Int8Tensor.from_hp(torch.randn(4, 6), PerRow())",
        dequantized,
        {
            "inference_mode": VIEW_IN_INFERENCE_MODE,
            "mutation": COPY_OF_PLAIN,
            "conversion": DTYPE_LEFT_OUT,
            "gradients": NO_GRADIENT,
        },
    ),
    Subject(
        "Float8Tensor",
        "torchao",
        f"from torchao.quantization import Float8Tensor\n{GRANULARITY}"
        "w = Float8Tensor.from_hp(torch.randn(4, 6), granularity=PerRow())",
        dequantized,
        {
            "inference_mode": VIEW_IN_INFERENCE_MODE,
            "mutation": COPY_OF_PLAIN,
            "conversion": DTYPE_LEFT_OUT,
            "gradients": NO_GRADIENT,
            "views": NO_ALIAS,
            "autocast": Reproduction(
                "with torch.autocast('cpu', torch.bfloat16):\n    torch.randn(3, 6) @ w.t()",
                "RuntimeError: expected m1 and m2 to have the same dtype",
            ),
        },
    ),
    Subject(
        "IntxUnpackedToInt8Tensor",
        "torchao",
        "from torchao.quantization import IntxUnpackedToInt8Tensor\n"
        "w = IntxUnpackedToInt8Tensor.from_hp(torch.randn(4, 64), (1, 32), torch.int4)",
        dequantized,
        {"inference_mode": VIEW_IN_INFERENCE_MODE, "mutation": COPY_OF_PLAIN, "gradients": NO_GRADIENT},
    ),
    Subject(
        "MXTensor",
        "torchao",
        "from torchao.prototype.mx_formats.mx_tensor import MXTensor\n"
        "w = MXTensor.to_mx(torch.randn(4, 64), torch.float8_e4m3fn)",
        dequantized,
        {
            "values": NARROW,
            "writes_to_views": NARROW,
            "inference_mode": TRANSPOSED_IN_INFERENCE_MODE,
            "views": NO_ALIAS,
            "mutation": COPY_OF_PLAIN,
            "conversion": DTYPE_LEFT_OUT,
        },
    ),
    Subject(
        "NVFP4Tensor",
        "torchao",
        "from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor\n"
        "w = NVFP4Tensor.to_nvfp4(torch.randn(4, 64))",
        dequantized,
        {
            "values": Reproduction("w.view(-1)", "IndexError: Dimension out of range"),
            "writes_to_views": Reproduction("w.view(-1)", "IndexError: Dimension out of range"),
            "keyword_arguments": Reproduction(
                "y, x = torch.randn(3, 4), torch.randn(3, 64)\n"
                "got = torch.addmm(y, x, w.t(), beta=2, alpha=3)\n"
                "torch.testing.assert_close(got, torch.addmm(y, x, w.dequantize().t(), beta=2, alpha=3))",
                "AssertionError: Tensor-likes are not close",
            ),
            "inference_mode": TRANSPOSED_IN_INFERENCE_MODE,
            "views": NO_ALIAS,
            "mutation": COPY_OF_PLAIN,
            "printing": Reproduction(
                "from torch._subclasses import FakeTensorMode\nrepr(FakeTensorMode().from_tensor(w))",
                "AssertionError: Please convert all Tensors to FakeTensors first",
            ),
        },
    ),
    Subject(
        "NF4Tensor",
        "torchao",
        "from torchao.quantization import NF4Tensor\nw = NF4Tensor.from_tensor(torch.randn(256, 256), 64, 256)",
        lambda w: w.get_original_weight(),
        {
            "values": Reproduction(
                "x = torch.randn(3, 256)\ntorch.testing.assert_close(x @ w, x @ w.get_original_weight())",
                "AssertionError: Tensor-likes are not close",
            ),
            "two_values": Reproduction("torch.nn.functional.linear(w, w)", "RecursionError"),
            "clone_and_detach": Reproduction(
                "assert torch.equal(w.clone().get_original_weight(), w.get_original_weight())",
                "AssertionError",
            ),
            "inference_mode": TRANSPOSED_IN_INFERENCE_MODE,
            "views": Reproduction("assert torch._C._is_alias_of(w, w.detach())", "AssertionError"),
            "writes_to_views": Reproduction("w.as_strided(w.shape, w.stride())", "IndexError: tuple index"),
            "grad_mode": Reproduction(
                "w.requires_grad_()\nw.view(-1)",
                "RuntimeError: Attempted to make a tensor into a differentiable view",
            ),
            "conversion": Reproduction("assert w.to(w.dtype) is w", "AssertionError"),
            "strangers": Reproduction(
                "class Other(torch.Tensor):\n"
                "    @classmethod\n"
                "    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):\n"
                "        return 'called'\n\n"
                "other = torch.Tensor._make_subclass(Other, torch.ones(w.shape))\n"
                "assert torch.hypot(w, other) == 'called'",
                "TypeError: 'NotImplementedType' object is not callable",
            ),
        },
    ),
    Subject(
        "TwoTensor",
        "torch",
        "from torch.testing._internal.two_tensor import TwoTensor\n"
        "w = TwoTensor(torch.randn(4, 6), torch.randn(4, 6))",
        lambda w: (w.a, w.b),
        {
            "inference_mode": TRANSPOSED_IN_INFERENCE_MODE,
            "lazy_bits": Reproduction(
                "a = torch.randn(4, 6, dtype=torch.complex64).conj().imag\n"
                "assert torch.equal((TwoTensor(a, a.clone()) * 2).a, a * 2)",
                "AssertionError",
            ),
            "strangers": Reproduction(
                "class Other(torch.Tensor):\n"
                "    @classmethod\n"
                "    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):\n"
                "        assert TwoTensor in types, 'called with an inner tensor'\n"
                "        return NotImplemented\n\n"
                "torch.hypot(w, torch.Tensor._make_subclass(Other, torch.ones(4, 6)))",
                "AssertionError: called with an inner tensor",
            ),
            "inner_requires_grad": Reproduction(
                "a = torch.randn(4, 6, requires_grad=True)\n"
                "assert TwoTensor(a, a.detach().clone()).sum().requires_grad",
                "AssertionError",
            ),
        },
    ),
    Subject(
        "MaskedTensor",
        "torch",
        "from torch.masked import MaskedTensor\n"
        "w = MaskedTensor(torch.randn(4, 6), torch.ones(4, 6, dtype=torch.bool))",
        lambda w: w.get_data(),
        {
            "values": Reproduction("w.norm()", "TypeError: .*unexpected keyword argument 'p'"),
            "keyword_arguments": Reproduction("w.sum(dtype=torch.float64)", "TypeError: .*argument: 'dim'"),
            "inference_mode": TRANSPOSED_IN_INFERENCE_MODE,
            "views": NO_ALIAS,
            "two_values": Reproduction("torch.where(w > 0, w, w)", "RecursionError"),
            "two_value_gradients": Reproduction(
                "w.requires_grad_()\ntorch.maximum(w, w * 2).sum().backward()", "RecursionError"
            ),
        },
    ),
]
OURS = [
    Subject(
        "JaggedTensor",
        "subclasses",
        "from subclasses.ragged import JaggedTensor\n"
        "w = JaggedTensor.from_tensors([torch.randn(6) for _ in range(3)])",
        lambda w: w.to_dense(),
        ours=True,
    ),
    Subject(
        "PaddedTensor",
        "subclasses",
        "from subclasses.ragged import PaddedTensor\nw = PaddedTensor(torch.randn(3, 6), torch.full((3,), 6))",
        lambda w: w.to_dense(),
        ours=True,
    ),
    Subject(
        "KeyedJaggedTensor",
        "subclasses",
        "from subclasses.keyed import KeyedJaggedTensor\n"
        "lengths = torch.tensor([1, 2, 0, 3, 1, 1])\n"
        "w = KeyedJaggedTensor(list('abc'), torch.arange(8), lengths, weights=torch.rand(8))",
        lambda w: torch.stack([w.feature_weights(key).to_dense() for key in w.keys]),
        ours=True,
        options={"construct": _keyed},
    ),
    Subject(
        "Int8Tensor here",
        "subclasses",
        "from subclasses.int8 import Int8Tensor\nw = Int8Tensor.from_float(torch.randn(4, 6))",
        dequantized,
        ours=True,
    ),
    *(
        Subject(
            f"{name} here",
            "subclasses",
            f"from examples.classes.{name.lower()} import {name}\nw = {name}.from_float(torch.randn(4, 64){more})",
            lambda w: w.materialize(),
            ours=True,
        )
        for name, more in (("Float8", ""), ("MXFP8", ""), ("NVFP4", ""), ("NF4", ", 8, 8"))
    ),
]
SUBJECTS = {subject.name: subject for subject in (*OTHERS, *OURS)}
