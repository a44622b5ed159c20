"""Classes as a new author writes them first: the advice on each fault is its fix, after which nothing is broken.

Other classes of new authors keep most promises; the advice on the rest names the rule at fault.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subclasses import Outer, inner, static
from subclasses.testing import examine
from tests.subclasses.subjects import declare
from tests.subclasses.test_new_classes import Gaussian, Packed, Polynomial, Total
from tests.subclasses.testing.faults import of_tensors, ruled

aten = torch.ops.aten

# Numbers with a fixed count of binary digits behind the point.
Fixed = declare(
    keywords={"fallback": "materialize"},
    raw=inner(dtype=torch.int32),
    digits=static(default=8),
    annotations={"digits": int},
    outer=staticmethod(lambda raw: Outer(raw.shape, dtype=torch.float32)),
    materialize=lambda self: self.raw / 2**self.digits,
)
# Positive numbers by their logarithms.
Logs = declare(
    keywords={"fallback": "materialize"}, exponent=inner(), materialize=lambda self: self.exponent.exp()
)
# Weights of -1, 0 and 1, with a scale for each row.
Ternary = declare(
    keywords={"fallback": "materialize", "dtype_from": "scale", "size_from": "signs"},
    signs=inner(dtype=torch.int8),
    scale=inner(),
    materialize=lambda self: self.signs * self.scale,
)
# Some rows, again and again.
Season = declare(
    keywords={"fallback": "materialize"},
    period=inner(shape="n d"),
    repeats=static(default=2),
    annotations={"repeats": int},
    outer=staticmethod(lambda period, repeats: Outer((repeats * period.shape[0], period.shape[1]))),
    materialize=lambda self: self.period.repeat(self.repeats, 1),
)


def fixed(cls, digits=4):
    return lambda: cls(torch.randint(-99, 99, (4, 6), dtype=torch.int32), digits=digits)


def dense(cls, *operands):
    return [t.materialize() if isinstance(t, cls) else t for t in operands]


def add(func, x, y, alpha=1):
    if alpha == 1 and all(isinstance(t, Fixed) for t in (x, y)) and x.digits == y.digits:
        return type(x)(x.raw + y.raw, digits=x.digits)
    return func(*dense(Fixed, x, y), alpha=alpha)


def multiply(func, x, y):
    is_pair = isinstance(x, Logs) and isinstance(y, Logs)
    return type(x)(x.exponent + y.exponent) if is_pair else func(*dense(Logs, x, y))


def linear(func, x, w, bias=None):
    if not isinstance(w, Ternary) or isinstance(x, Ternary):
        return Ternary.unruled(func, x, w, bias)
    y = func(x, w.signs.to(x.dtype)) * w.unwrap("scale").squeeze(-1)
    return y if bias is None else y + bias


def scale(func, x, y):
    is_number = isinstance(x, Season) and not isinstance(y, Tensor)
    return type(x)(func(x.period, y), repeats=x.repeats) if is_number else func(*dense(Season, x, y))


OPERAND = "isinstance(operand, cls) before it reads a field"
# The class, its values, the op with a first rule and the fixed one, the promises with words of their advice, options.
DRAFTS = {
    "fixed point": (
        *(Fixed, fixed, aten.add),
        lambda func, x, y, alpha=1: type(x)(x.raw + y.raw, digits=x.digits),
        add,
        {
            **dict.fromkeys(
                ("values", "other_metadata", "mutation", "writes_to_views", "optimizer"), OPERAND
            ),
            "keyword_arguments": "an alpha=, rounding_mode=, keepdim= or dtype= that is dropped",
            "two_values": "each argument, such as alpha=",
            "mixed_metadata": "convert one of them where they differ",
        },
        lambda cls: {"variants": [fixed(cls, digits=6)]},
    ),
    "logarithms": (
        *(Logs, lambda cls: lambda: cls(torch.randn(4, 6)), aten.mul),
        lambda func, x, y: type(x)(x.exponent + y.exponent),
        multiply,
        dict.fromkeys(
            (
                *("values", "keyword_arguments", "mutation", "writes_to_views"),
                *("stale_gradients", "two_value_gradients", "optimizer", "gradients", "inner_gradients"),
            ),
            OPERAND,
        ),
        lambda cls: {},
    ),
    "ternary weights": (
        Ternary,
        lambda cls: lambda: cls(torch.randint(-1, 2, (4, 6), dtype=torch.int8), torch.rand(4, 1)),
        F.linear,
        lambda func, x, w, bias=None: func(x, w.signs.to(x.dtype), bias) * w.scale.t(),
        linear,
        {
            "values": "correct the result of the rule for such operands",
            "two_values": OPERAND,
            **dict.fromkeys(("gradients", "inner_gradients"), "in place of x.unwrap(name)"),
        },
        lambda cls: {},
    ),
    "a season": (
        *(Season, lambda cls: lambda: cls(torch.randn(4, 6), repeats=3), aten.mul.Tensor),
        lambda func, x, y: type(x)(func(x.period, y)),
        scale,
        {
            **dict.fromkeys(("values", "keyword_arguments"), "pass each field on"),
            **dict.fromkeys(("two_values", "stale_gradients", "optimizer"), OPERAND),
            "mutation": "correct the rule",
        },
        lambda cls: {},
    ),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_advice_on_a_first_draft_mends_it(draft):
    base, values, key, wrong, right, advice, options = DRAFTS[draft]
    wrong, right = (ruled(base, {key: rule}) for rule in (wrong, right))
    mends = {o.promise.name: o.mend for o in examine(values(wrong), paths={}, **options(wrong)).of("broken")}
    assert {name: advice[name] in mend for name, mend in mends.items()} == dict.fromkeys(advice, True)
    assert examine(values(right), paths={}, **options(right)).broken == []


# ---- classes in no page ------------------------------------------------------------------------------------

PLAIN = {"other_metadata", "kept_metadata", "mixed_metadata", "metadata_guard", "op_infos_agree"}
UNMATERIALIZED = {*PLAIN, "fresh_values", "materialize_gradients"}
TWO = "where x * x itself fails, correct its rule for two values"
# The values, the reference, the promises that are broken with words of their advice, the promises not tried.
UNSEEN = {
    "polynomials, by their numbers at a point": (
        of_tensors(Polynomial, (4, 6)),
        lambda p: p.at(0.5),
        dict.fromkeys(("values", "mutation", "writes_to_views"), OPERAND),
        UNMATERIALIZED | {"randomness", "exported"},
    ),
    "normal variables, which represent no tensor": (
        of_tensors(Gaussian),
        None,
        {"values": "correct the result of the rule", "stale_gradients": TWO, "optimizer": TWO},
        {
            *(
                *UNMATERIALIZED,
                "outside",
                "keyword_arguments",
                "two_values",
                "two_value_gradients",
                "gradients",
            ),
            *(
                "operand_gradients",
                "cotangents",
                "lazy_bits",
                "autocast",
                "sizes",
                "dynamic_shapes",
                "exported",
            ),
        },
    ),
    "packed matrices": (
        of_tensors(Packed, (3,)),
        None,
        {
            "optimizer": "a rule takes the arguments of its op, aten::add_",
            "compiled_values": "declare it as a constant of the class, with constant()",
        },
        PLAIN | {"sizes", "dynamic_shapes", "randomness"},
    ),
    "sums of exponentials": (
        of_tensors(Total),
        lambda x: x.largest.exp() * x.rest,
        dict.fromkeys(("values", "mutation", "writes_to_views"), OPERAND),
        UNMATERIALIZED,
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", UNSEEN)
def test_advice_on_classes_in_no_page(name):
    values, reference, advice, untried = UNSEEN[name]
    report = examine(values, reference=reference)
    mends = {o.promise.name: o.mend for o in report.of("broken")}
    told = [advice[name] in mend and "test_new_classes.py:" in mend for name, mend in mends.items()]
    assert all(told) and mends.keys() == advice.keys()
    assert {o.promise.name for o in report.of("skipped")} == untried
