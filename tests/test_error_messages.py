"""Every error class, each with its messages: the place, the expected and the found value, and a way out.

A row has a user's mistake, the code of an error of `subclasses`, and the words that the message has to hold. These name
the wrong value, the expected or the found value, and a way out. Errors of desugar also name the marked line of this
file.
"""

import ast
from pathlib import Path

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import desugar
import subclasses
from desugar import DesugarError
from desugar.backends.choose import choose_backend
from desugar.dynamo.backend import Specialized
from subclasses import DispatchError, Outer, SpecError, TensorSubclass, constant, dynamic, inner, static
from subclasses.int8 import Int8Tensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.testing import ConformanceError, check
from tests.subclasses.subjects import declare

ROOT = Path(__file__).parents[1]


Pair = declare(
    name="Pair",
    first=inner(),
    second=inner(),
    tag=static(default=""),
    annotations={"tag": str},
    keywords={"fallback": "map"},
)


Strict = declare(name="Strict", data_=inner(dtype=torch.float32))


def represented(name, field, **body):
    """A class that materializes twice its field `raw`."""
    return declare(
        name=name,
        keywords={"fallback": "materialize"},
        **{"raw": field, "materialize": lambda self: self.raw * 2} | body,
    )


Dense = represented("Dense", inner())


Viewed = declare(name="Viewed", first=inner(), scale=inner(), keywords={"fallback": "views"})


Fixed = declare(
    name="Fixed",
    raw=inner(),
    outer=staticmethod(lambda raw: Outer(raw.shape, dtype=torch.float64)),
    keywords={"fallback": "map"},
)


Unsized = declare(name="Unsized", raw=inner(), outer=staticmethod(lambda raw: raw.shape))


Endless = represented("Endless", inner(), materialize=lambda self: self * 2)


FixedDense = represented("FixedDense", inner(dtype=torch.float32))


GRAD = torch.ones(3, requires_grad=True)
ONE, TRUE = torch.ones(3), torch.tensor(True)
FACTORS = declare(Dense, name="Factors", keywords={"trainable": True})


def pair(grad=False):
    return Pair(torch.ones(3), torch.ones(3)).requires_grad_(grad)


# ---- SpecError: a declaration -------------------------------------------------------------------------------


def made(name, annotations=None, base=TensorSubclass, **body):
    """A class with an inner tensor `data_` and further members; class keywords are in `keywords`."""
    return declare(base, name=name, data_=inner(), annotations=annotations or {}, **body)


def rule(func, *args): ...


Shaped = declare(name="Shaped", data_=inner(shape="out in"), scale=inner(shape="out 1"))


MUL = torch.ops.aten.mul.Tensor
MIXIN = type("Mixin", (), {"__annotations__": {"scale": Tensor}, "scale": inner()})
SPEC = {
    "nothing to train": (
        lambda: declare(name="Frozen", data_=inner(dtype=torch.int8), keywords={"trainable": True}),
        "keyword-conflict",
        ["Frozen", "trainable=True", "torch.int8", "remove"],
    ),
    "bad shape": (
        lambda: declare(name="Shaped", data_=inner(shape="out, in")),
        "keyword-value",
        ["Shaped.data_", "shape='out, in'", "separated by spaces", "shape='out in'"],
    ),
    "shape and ndim": (
        lambda: declare(name="Shaped", data_=inner(shape="out in", ndim=2)),
        "keyword-conflict",
        ["Shaped.data_", "shape='out in'", "remove ndim=2"],
    ),
    "a rule without a call": (
        lambda: Strict.implements(rule),
        "rule-not-called",
        ["Strict.implements", "rule", "@Strict.implements(torch.add)", "wrap_torch_function"],
    ),
    "builtin": (
        lambda: Strict.implements(len),
        "rule-not-called",
        ["Strict.implements", "never", "len of builtins", "torch.sum"],
    ),
    "module": (
        lambda: Strict.implements(nn.Linear(2, 2)),
        "rule-not-called",
        ["never", "Linear", "forward", "F.linear"],
    ),
    "function of functional": (
        lambda: Strict.implements(F.sigmoid),
        "rule-not-called",
        ["never", "sigmoid of torch.nn.functional", "name one"],
    ),
    "adopt a module": (
        lambda: subclasses.adopt(nn.Linear),
        "adopt-refused",
        ["adopt", "derived from torch.Tensor", "Linear"],
    ),
    "adopt a declared class": (
        lambda: subclasses.adopt(Pair),
        "adopt-refused",
        ["adopt", "Pair", "declared with TensorSubclass", "all hooks"],
    ),
    "adopt a class without flattening": (
        lambda: subclasses.adopt(torch.masked.MaskedTensor),
        "adopt-refused",
        ["MaskedTensor", "__tensor_flatten__", "define both", "TensorSubclass"],
    ),
    "no inner tensor": (
        lambda: declare(name="Empty", tag=static(default=0)),
        "inner-missing",
        ["Empty", "no inner tensor", "inner()"],
    ),
    "equal without hash": (
        lambda: made("Compared", __eq__=lambda self, other: self.data_ == other.data_),
        "method-signature",
        ["Compared", "__eq__ without __hash__", "torch.Tensor.__hash__", "torch.eq"],
    ),
    "a rule for a generated method": (
        lambda: Pair.implements(Tensor.__deepcopy__)(lambda func, x, memo: x),
        "rule-not-called",
        ["Tensor.__deepcopy__", "generated", "in the body of Pair"],
    ),
    "unknown size_from": (
        lambda: made("Sized", keywords={"size_from": "dta"}),
        "keyword-value",
        ["Sized", "'dta'", "data_"],
    ),
    "unknown keyword": (
        lambda: made("Keyed", keywords={"fallbck": "map"}),
        "keyword-value",
        ["Keyed", "'fallbck'", "fallback"],
    ),
    "unknown fallback": (
        lambda: made("Fallen", keywords={"fallback": "mapped"}),
        "keyword-value",
        ["Fallen", "'mapped'", "materialize", "map", "error"],
    ),
    "nothing to materialize": (
        lambda: made("Bare", keywords={"fallback": "materialize"}),
        "materialize-missing",
        ["Bare", "materialize(self) -> Tensor"],
    ),
    "mutable default": (
        lambda: made("Listed", {"shape_": list}, shape_=static(default=[])),
        "default-refused",
        ["Listed.shape_", "[]", "tuple"],
    ),
    "tensor default": (
        lambda: made("Held", {"scale": Tensor}, scale=static(default=torch.ones(1))),
        "annotation-wrong",
        ["Held.scale", "tensor", "inner()"],
    ),
    "taken name": (
        lambda: declare(name="Named", data=inner()),
        "name-taken",
        ["Named.data", "choose another name"],
    ),
    "half optional": (
        lambda: made("Half", {"zero": Tensor}, zero=inner(optional=True)),
        "annotation-wrong",
        ["Half.zero", "Tensor | None = inner(optional=True)"],
    ),
    "no annotation": (
        lambda: type("Bare", (TensorSubclass,), {"data_": inner()}),
        "annotation-wrong",
        ["Bare.data_", "no annotation", "data_: Tensor = inner()"],
    ),
    "float dynamic": (
        lambda: made("Floating", {"length": "float"}, length=dynamic()),
        "annotation-wrong",
        ["Floating.length", "non-negative int", "'float'", "static()"],
    ),
    "undeclared tensor": (
        lambda: made("Plain", {"scale": "Tensor"}),
        "field-undeclared",
        ["Plain", "`scale: Tensor`", "`scale: Tensor = inner()`", "constant([...])"],
    ),
    "undeclared value": (
        lambda: made("Plain", {"axis": "int"}, axis=0),
        "field-undeclared",
        ["Plain", "`axis: int = 0`", "static(default=0)", "ClassVar[int] = 0"],
    ),
    "tensor in the class body": (
        lambda: made("Coded", BOOK=torch.ones(2)),
        "constant-refused",
        ["Coded.BOOK", "compilers refuse", "`BOOK = constant(...)`"],
    ),
    "a constant of text": (lambda: constant(["a"]), "constant-refused", ["constant()", "numbers", "['a']"]),
    "replaced field": (
        lambda: declare(Pair, name="Axial", tag="x"),
        "field-undeclared",
        ["Axial.tag = 'x'", "inherited", "static(default=...)"],
    ),
    "undeclared base": (
        lambda: made("Mixed", base=(MIXIN, TensorSubclass)),
        "base-refused",
        ["Mixed", "Mixin", "'scale'", "class Mixin(TensorSubclass)"],
    ),
    "a rule that is no function": (
        lambda: Strict.implements(MUL)(3),
        "rule-parameters",
        ["Strict", "aten.mul.Tensor", "got 3", "@Strict.implements"],
    ),
    "an operator": (
        lambda: made("Adding", __add__=lambda self, other: self),
        "method-not-called",
        ["Adding.__add__", "@Adding.implements"],
    ),
    "two rules": (
        lambda: made("Ruled", rules={MUL: lambda *args: 0}).implements(MUL)(lambda *args: 1),
        "rules-conflict",
        ["Ruled", "two rules", "aten.mul.Tensor", "remove one"],
    ),
    "a rule for nothing": (
        lambda: Strict.implements("mul"),
        "rule-key",
        ["Strict.implements", "'mul'", "torch.ops.aten.mul.Tensor"],
    ),
    "coverage of no class": (
        lambda: subclasses.coverage(int),
        "class-not-declared",
        ["coverage()", "TensorSubclass", "int"],
    ),
}

# ---- TypeError, ValueError: a construction ------------------------------------------------------------------

VALUES = [
    (
        lambda: Shaped(torch.ones(4, 3), torch.ones(5, 1)),
        ValueError,
        ["Shaped.scale", "(out 1)", "out=4 of 'data_'", "(5, 1)"],
    ),
    (
        lambda: Shaped(torch.ones(4), torch.ones(5, 1)),
        ValueError,
        ["Shaped.data_", "(out in)", "2 dims", "(4)"],
    ),
    (lambda: Pair(torch.ones(2), 3), TypeError, ["Pair.second", "expected a Tensor", "int"]),
    (lambda: Strict(torch.ones(2, dtype=torch.int8)), ValueError, ["Strict.data_", "float32", "int8"]),
    (
        lambda: Pair(torch.ones(2), torch.ones(2, device="meta")),
        ValueError,
        ["Pair.second", "cpu", "meta", "any"],
    ),
    (
        lambda: Pair(torch.ones(2), torch.ones(2), tag=[]),
        TypeError,
        ["Pair.tag", "hashable", "list", "tuple"],
    ),
    (
        lambda: Pair(torch.ones(2), torch.ones(2), tag=torch.ones(1)),
        TypeError,
        ["Pair.tag", "static", "inner()"],
    ),
    (
        lambda: setattr(pair(), "first", torch.ones(3, requires_grad=True)),
        ValueError,
        ["Pair.first", ".detach()"],
    ),
    (
        lambda: nn.ParameterList([nn.Parameter(FixedDense(torch.ones(2)), requires_grad=False)]).half(),
        TypeError,
        [
            "FixedDense.data",
            "Module.half",
            "float32 to torch.float16",
            "dtype_from=",
            "aten._to_copy.default",
        ],
    ),
    (
        lambda: Unsized(torch.ones(2)),
        TypeError,
        ["Unsized.outer", "`return Outer(size=(...))`", "torch.Size([2])"],
    ),
    (
        lambda: Endless(torch.ones(2)) + 1,
        RecursionError,
        ["aten.mul.Tensor", "Endless", "materialize()", "calls itself", "inner tensors", "x.unwrap()"],
    ),
    (lambda: desugar.compile(3), TypeError, ["function or nn.Module", "int"]),
    (lambda: desugar.compile(len, backend="quick"), ValueError, ["inductor", "eager", "callable", "'quick'"]),
    (
        lambda: desugar.compile(len, backend="eager", mode="max-autotune"),
        ValueError,
        ["mode", "inductor", "eager"],
    ),
    (lambda: subclasses.coverage(Pair).ops("ruled"), ValueError, ["'ruled'", "rule", "materialize"]),
    (lambda: ragged(2, 3) + ragged(3, 2), (RuntimeError, ValueError), ["[2, 3]", "[3, 2]"]),
    (
        lambda: differentiated_twice(lambda x: F.dropout(x, 0.5) ** 3),
        DesugarError,
        ["other random numbers", "dropout", "eager mode"],
    ),
    (
        lambda: differentiated_twice(lambda x, b: x * x + b, 1),
        DesugarError,
        ["its argument, a Tensor, is gone", "keep the arguments"],
    ),
]


def ragged(*lengths):
    return JaggedTensor.from_tensors([torch.ones(n) for n in lengths])


def differentiated_twice(fn, others=0):
    """A second derivative of a compiled function, of whose other arguments nothing else is kept."""
    x = torch.ones(3, requires_grad=True)
    y = desugar.compile(fn, backend="eager")(x, *(torch.ones(3) for _ in range(others)))
    return torch.autograd.grad(y.sum(), x, create_graph=True)


def parameter_that_cannot_train():
    weight = nn.Parameter(Dense(torch.ones(3)))
    weight.square().sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()


# ---- DispatchError: an op -----------------------------------------------------------------------------------


def rows(dim=4):
    return JaggedTensor.from_tensors([torch.ones(2, dim), torch.ones(3, dim)])


def int8():
    return Int8Tensor.from_float(torch.ones(4, 8), block_size=(1, 4))


def padded():
    return PaddedTensor.from_tensors([torch.ones(2), torch.ones(3)], batch_multiple=4)


def attend(**options):
    x = rows()
    return nn.MultiheadAttention(4, 2, batch_first=True, **options)(x, x, x)


def strictly():
    with subclasses.strict():
        return Dense(torch.ones(2)) + 1


Ruled = represented(
    "Ruled",
    inner(),
    rules={
        MUL: lambda func, x, y: Ruled(x.raw * y),
        torch.ops.aten.add_.Tensor: lambda func, x, y, alpha=1: Ruled(x.raw + 1),
    },
)
Structure = declare(
    name="Structure",
    raw=inner(),
    keywords={"fallback": "map"},
    rules={
        torch.linalg.vector_norm: lambda func, x, *args, **kwargs: x.raw.sum(),
        torch.ops.aten.t.default: lambda func, x: Structure(x.raw.t()),
    },
)


def writes_beside_a_slice():
    x = rows() * torch.ones((), requires_grad=True)
    part = x[:1]
    x[0] = torch.zeros(2, 4)
    return part


class Wraps(nn.Module):
    def forward(self, x):
        return Pair(x, x)


DISPATCH = [
    (
        lambda: Strict(torch.ones(2)) * 2,
        "no-rule",
        ["Strict", "no rule", "aten.mul.Tensor", "@Strict.implements"],
    ),
    (strictly, "strict-mode", ["aten.add.Tensor", "materialize a Dense", "strict()"]),
    (
        parameter_that_cannot_train,
        "optimizer-step",
        ["SGD.step()", "Dense", "Dense(self.raw) in `forward`", "requires_grad_(False)", "trainable=True"],
    ),
    (
        lambda: nn.Parameter(FACTORS(ONE)).detach().copy_(ONE),
        "write-misfit",
        ["aten.copy_.default", "Parameter of a Factors", "lerp_", "multi_avg_fn"],
    ),
    (
        lambda: Dense(torch.ones(2)).add_(1),
        "write-refused",
        ["aten.add_.Tensor", "writes to a Dense", "functional op"],
    ),
    (
        lambda: pair() + Pair(torch.ones(3), torch.ones(3), tag="other"),
        "metadata-differs",
        ["aten.add.Tensor", "different metadata", "'other'", "@Pair.implements"],
    ),
    (
        lambda: Fixed(torch.ones(2)).half(),
        "dtype-misfit",
        ["aten._to_copy.default", "Fixed", "torch.float16", "float64", "`outer`", "@Fixed.implements"],
    ),
    (lambda: torch.ones(3).add_(pair()), "write-to-plain", ["aten.add_.Tensor", "Pair", "plain tensor"]),
    (
        lambda: nn.Conv1d(4, 2, 3)(rows()),
        "row-dims",
        ["conv1d", "[B, C, T]", "JaggedTensor", "x.transpose(1, 2)"],
    ),
    (
        lambda: F.max_pool1d(rows().mT, 2, ceil_mode=True),
        "argument-refused",
        ["max_pool1d", "ceil_mode=False", "JaggedTensor"],
    ),
    (
        lambda: attend(add_zero_attn=True),
        "argument-refused",
        ["multi_head_attention_forward", "add_zero_attn", "need_weights=False"],
    ),
    (
        lambda: rows().transpose(0, 1) + 1,
        "no-rule",
        ["TimeMajor", "aten.add.Tensor", "x.transpose(0, 1) first"],
    ),
    (
        lambda: Viewed(torch.ones(3), torch.ones(3)).exp(),
        "no-rule",
        ["Viewed", "no rule for aten.exp.default", "@Viewed.implements(torch.ops.aten.exp.default)"],
    ),
    (
        lambda: Viewed(torch.ones(2, 3), torch.ones(2, 1)).t(),
        "inners-disagree",
        [
            "aten.t.default",
            "Viewed",
            "'scale'",
            "(2, 1)",
            "(2, 3)",
            "@Viewed.implements(torch.ops.aten.t.default)",
        ],
    ),
]

# Further codes of `subclasses`, each with a call that meets it.
DISPATCH += [
    (lambda: (Ruled(GRAD) * 2).unwrap("raw"), "formula-result", ["a Ruled", "x.materialize()"]),
    (lambda: Ruled(torch.ones(3)).add_(1), "rule-write", ["aten.add_.Tensor", "x.raw.copy_(...)"]),
    (lambda: torch.cat([Structure(ONE), pair()]), "classes-mixed", ["Structure", "Pair", "aten.cat"]),
    (lambda: setattr(pair(True) * 2, "first", ONE), "assignment-recorded", ["Pair", "x.detach()"]),
    (lambda: Structure(GRAD).backward(Structure(ONE)), "value-as-cotangent", ["x.cotangent(raw=...)"]),
    (lambda: Strict(GRAD * 1).backward(ONE), "cotangent-plain", ["Strict", "wrap_cotangent"]),
    (lambda: Dense(ONE).cotangent(raw=ONE).exp(), "cotangent-operand", ["aten.exp.default", "Dense"]),
    (lambda: pair().apply_(abs), "no-memory", ["Pair.apply_", "x.first"]),
    (lambda: torch.masked.mean(rows(), 1), "padding-counted", ["torch.masked.mean", "JaggedTensor"]),
    (lambda: rows() @ rows().mT, "ragged-dims", ["matmul", "scaled_dot_product_attention"]),
    (lambda: rows() + rows().unsqueeze(1), "rows-apart", ["aten.add.Tensor", "unsqueeze"]),
    (writes_beside_a_slice, "write-shared", ["JaggedTensor", "clone()"]),
    (lambda: [x := rows(), x[::2].mul_(2)], "write-lost", ["x[index] = value", "clone()"]),
    (lambda: [x := rows()[::2], x[::2].mul_(2)], "write-lost", ["x[index] = value", "clone()"]),
    (
        lambda: [x := rows(), x[:, 1::2][::2].transpose(1, 2)[:, 0].zero_()],
        "write-lost",
        ["x[index] = value"],
    ),
    (lambda: int8()[:, 1:7], "blocks-refused", ["(1, 4)", "dequantize()"]),
    (lambda: padded()[::2], "batch-padded", ["aten.slice.Tensor", "x.to_jagged()"]),
    (lambda: torch.linalg.norm(Structure(ONE)), "rule-not-asked", ["torch.linalg.norm", "vector_norm"]),
    (lambda: torch.func.grad(lambda t: Pair(t, t).first.sum())(ONE), "transform-refused", ["Pair"]),
    (lambda: Pair(GRAD[None], GRAD[None])[:1].t_(), "view-derivative", ["aten.t_.default", "x.mT"]),
    (lambda: Structure(GRAD[None]).t(), "view-derivative", ["aten.t.default", "Structure"]),
    (
        lambda: Viewed(ONE[None], ONE[:1]).as_strided((3, 1), (1, 3)),
        "strided-view",
        ["aten.as_strided.default", "Viewed", "'scale'"],
    ),
    (lambda: torch.export.export(Wraps(), (ONE,)), "graph-refused", ["torch.export", "Pair"]),
]


# ---- DesugarError: a function -------------------------------------------------------------------------------


def assigns_data(x):
    x.data = torch.zeros(3)
    return x * 2


def writes_detached(x):
    part = x.detach()
    part.mul_(x)
    return part


COUNTS, KEPT = [], []


def counts_its_calls(x):
    COUNTS.append(None)
    return [x * 2] * len(COUNTS)


def keeps_for_later(x):
    if not KEPT:
        KEPT.append(x * 2)
    return x + KEPT[0]


def seeds(x):
    torch.manual_seed(3)
    return torch.rand(3) + x


def retains(x):
    y = x * 2
    y.retain_grad()
    return y


def leaves_gradients_off(x):
    y = x * 2
    torch.set_grad_enabled(False)
    return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def loop_with_a_gradient(x):
    return while_loop(lambda x: x.first.sum() < 9, lambda x: (x * 2,), (x,))[0]


def draws(x):
    return torch.cond(TRUE, lambda x: torch.rand_like(x) * x, lambda x: x * 2, (x,))


class Odd(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


REFUSED = [
    (seeds, (ONE,), ["random number generator", "manual_seed", "torch.Generator"]),
    (
        lambda x: x + torch.rand(3, generator=torch.Generator()),
        (ONE,),
        ["torch.Generator is made inside", "outside"],
    ),
    (retains, (GRAD,), ["retain_grad()", "torch.autograd.grad"]),
    (leaves_gradients_off, (GRAD,), ["leaves gradients turned off", "torch.no_grad"]),
    (
        lambda x: F.multilabel_margin_loss(x, torch.tensor([0, -1, 1])),
        (ONE,),
        ["multilabel_margin_loss", "decomposition counts the targets after a -1", "in eager mode"],
    ),
    (
        lambda x: torch.gru(x, x, [x], True, 2, 0.5, True, False, False),
        (ONE,),
        ["gru has dropout between its layers", "allow_rnn = False"],
    ),
    (
        lambda x: torch.sparse_coo_tensor(torch.arange(3)[None], x, (3,)) @ x,
        (GRAD,),
        ["sparse tensor", "sparse_coo_tensor", "gradients are on", "detached"],
    ),
    (lambda x: x.detach() * nn.Parameter(torch.ones(3)), (ONE,), ["requires grad because", "detach"]),
    (loop_with_a_gradient, (pair(True),), ["while_loop", "gradient", "in Python"]),
    (
        lambda x: x + torch.frombuffer(bytearray(12), dtype=torch.float32),
        (ONE,),
        ["made inside", "torch.frombuffer", "torch.tensor"],
    ),
    (draws, (GRAD,), ["function given to cond draws random numbers", "rand_like", "as operands"]),
    (
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        (ONE,),
        ["nested tensors", "JaggedTensor"],
    ),
    (
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1])).values(),
        (ONE,),
        ["nested tensors", "values and offsets", "JaggedTensor"],
    ),
    (keeps_for_later, (ONE,), ["for its next call", "lru_cache", "before the first compiled call"]),
    (lambda x: x + Doubled.apply(GRAD), (ONE,), ["autograd.Function", "(3,)", "as an argument"]),
    (lambda x: x * 2, (ONE.as_subclass(Odd),), ["Odd", "__torch_function__", "as_subclass"]),
    (lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(3),), ["data of a tensor", "torch.where"]),
    (lambda x: x * x.data_ptr(), (torch.ones(3),), ["data_ptr", "memory"]),
    (assigns_data, (torch.ones(3),), [".data", "copy_"]),
    (lambda x: x * 2 if x.grad is None else x, (torch.ones(3),), [".grad", "argument"]),
    (writes_detached, (GRAD,), ["input 0", "detached", "lose the gradient of that write", "clone()"]),
    (
        lambda x: x + torch.ones(1).expand(3).add_(1),
        (torch.ones(3),),
        ["add_ writes to an", "(3,)", "clone()"],
    ),
    (lambda x: x.resize_(5) * 2, (torch.ones(3),), ["size", "new tensor"]),
    (lambda x: x.requires_grad_() * 2, (ONE.clone(),), ["gets another size, stride", "new tensor"]),
    (counts_its_calls, (torch.ones(3),), ["another structure", "second time", "arguments only"]),
]


def assert_says(error, words):
    """Shows a message that failed the review in full."""
    text = " ".join(str(error).split())
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} is not in the message\n{type(error).__name__}: {error}"


def name_of(row):
    return getattr(row, "__name__", type(row).__name__) if callable(row) else None


# A call, the type of its error, the code or None, and the words of the message.
MESSAGES = {
    **{f"declaration: {case}": (call, SpecError, *rest) for case, (call, *rest) in SPEC.items()},
    **{f"value {i}": (call, kind, None, words) for i, (call, kind, words) in enumerate(VALUES)},
    **{f"op {i}": (call, DispatchError, *rest) for i, (call, *rest) in enumerate(DISPATCH)},
}


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("case", MESSAGES)
def test_what_a_message_says(case):
    call, kind, code, words = MESSAGES[case]
    with pytest.raises(kind) as caught:
        call()
    assert getattr(caught.value, "code", None) == code or code is None
    assert_says(caught.value, words)


@pytest.mark.sweep(16)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("fn", "args", "words"), REFUSED, ids=name_of)
def test_functions(fn, args, words):
    error = refusal(fn, *args)
    assert_says(error, words)
    assert error.where is not None and error.where.startswith(f"{__file__}:"), error


def refusal(fn, *args):
    """Calls desugar without Dynamo, which breaks most of these graphs before it calls a backend."""
    COUNTS.clear()
    KEPT.clear()

    def call(leaves):
        return tuple(optree.tree_leaves(fn(*leaves), none_is_leaf=True))

    graph, backend = torch.fx.symbolic_trace(lambda x: x), choose_backend("eager")
    of_a_graph = fn in (draws, loop_with_a_gradient)  # which the op runs itself
    with pytest.raises(DesugarError) as caught:
        desugar.trace(fn, *args) if of_a_graph else Specialized(call, backend, "", graph, ())(*args)
    return caught.value


# Refusals that need more than one call or another mode: the file whose tests meet each, and words of its tests.
AGAIN = "this backward has to run the function again, "
ELSEWHERE = {
    "a result holds a view of an argument that is written to, in another memory order than the argument": (
        "tests/desugar/tracing/test_views.py",
        "in another memory order",
    ),
    "PyTorch saves functions that its own AOTAutograd compiled (aot_compile)": (
        "tests/desugar/dynamo/test_saved_programs.py",
        "test_stock_compiles_what_is_saved",
    ),
    "the function writes to an argument, and a saved function checks no call for inner tensors that share memory": (
        "tests/desugar/dynamo/test_aot_autograd.py",
        "test_a_graph_that_writes_is_not_saved",
    ),
    ", a class written by hand": (  # up to 2.14 Dynamo refuses the loop
        "tests/desugar/test_higher_order_ops.py",
        "test_a_class_written_by_hand_is_named",
    ),
    "expected tensors with their values in memory, got a lazily negated one of size": (
        "tests/desugar/dynamo/test_backend.py",
        "test_an_argument_that_is_negated_lazily_is_refused",
    ),
    "without any (a derivative of sgn or of another step, for instance)": (
        "tests/subclasses/autograd/test_zero_gradients.py",
        "test_compiled_kernels_do_not_read_them",
    ),
    "an argument is a tensor of a functorch transform that has ended": (
        "tests/desugar/test_python_autograd.py",
        "test_a_tensor_of_a_transform_that_has_ended",
    ),
    "is assigned by a rule or __torch_dispatch__": (
        "tests/desugar/tracing/test_unsupported.py",
        "test_data_that_a_dispatch_assigns",
    ),
    "in an op, and Dynamo reads .": (
        "tests/desugar/dynamo/test_attributes.py",
        "test_a_replaced_inner_tensor_that_is_used_is_refused",
    ),
    ".__tensor_unflatten__ returns": (
        "tests/desugar/tracing/test_unsupported.py",
        "test_a_class_that_is_rebuilt_as_another",
    ),
    f"{AGAIN}which would draw other random numbers (": (
        "tests/test_error_messages.py",
        "other random numbers",
    ),
    f"{AGAIN}which would write to its arguments again": (
        "tests/desugar/wrapper/test_run.py",
        "write to its arguments again",
    ),
    "the gradient of a custom autograd.Function is to be differentiated, and torch.compile records its "
    "backward without gradients": ("tests/desugar/test_custom_ops.py", "is to be differentiated"),
    f"{AGAIN}and": ("tests/desugar/backward/test_backward.py", "has been assigned"),
    "record: the step cannot be captured as a CUDA graph:": (
        "tests/desugar/test_cuda_graphs.py",
        "stream is capturing",
    ),
    "requires grad although gradients are off around the call": (
        "tests/desugar/tracing/test_unsupported.py",
        "gradients are off",
    ),
}
# Messages without a test: an earlier check accepts the call, or raises a more specific message.
UNMET = {
    "backward() is called inside the function and would accumulate into .grad of its inputs",
    "without being a view of it",
    f"{AGAIN}and a tensor of size",
    # Not met by a call that is known.
    "a zero gradient would be traced with constant sizes, and the sizes of this call are symbols",
    "computes nothing with tensors, so there is no graph",
    "a tensor subclass that requires grad holds",  # a DTensor
}


def refusals():
    """The longest fixed part of the message at each place in desugar that raises one of its errors."""
    for path in sorted(Path(desugar.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("DesugarError",):
                parts = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                texts = [text for part in parts for text in str(part).split("\n")]
                if texts:
                    yield f"{path.name}:{node.lineno}", max(texts, key=len).strip()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_refusal_of_the_pass_is_tried():
    said = [str(refusal(fn, *args)) for fn, args, _ in REFUSED]
    met = dict(refusals())
    assert {*ELSEWHERE, *UNMET} <= {*met.values()}, "messages that no longer exist"
    for place, text in met.items():
        if text in ELSEWHERE:
            assert ELSEWHERE[text][1] in (ROOT / ELSEWHERE[text][0]).read_text(), text
        elif text not in UNMET:
            assert any(text in message for message in said), f"{place}: nothing here meets {text!r}"


@pytest.mark.slow
def test_the_kit_says_which_promise_how_and_what_to_do():
    odd = declare(Dense, name="Odd", rules={MUL: lambda func, x, y: x.materialize() + 1})
    with pytest.raises(ConformanceError) as caught:
        check(lambda: odd(torch.randn(3, 4)))
    assert_says(caught.value, ["Odd keeps", "breaks", "values", "broken:", "mend:"])


def test_an_error_of_the_users_own_stays_what_it_is():
    def fn(x):
        return x @ torch.ones(7)  # the user's mistake

    with pytest.raises(RuntimeError, match="the user's mistake") as caught:
        desugar.trace(fn, torch.ones(3))
    assert not isinstance(caught.value, DesugarError)
