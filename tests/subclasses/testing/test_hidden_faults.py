"""Faults that an author planted and the kit did not see, and right classes that it blamed."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subclasses
from subclasses import Outer, dynamic, inner, static
from subclasses.testing import examine
from tests.subclasses.subjects import declare
from tests.subclasses.testing.faults import (
    check_found,
    check_kept,
    finding,
    of_tensors,
    only,
    outcome,
    plain,
    ruled,
)

aten = torch.ops.aten


def unwrapped(x):
    return x.unwrap("held")


# ---- gradients that are not slopes ---------------------------------------------------------------------------

# With a rule, so that it has no reference: gradients are compared with differences.
Mapped = declare(keywords={"fallback": "map"})


def mapped(key, rule):
    cls = ruled(Mapped, {key: rule})
    return lambda: cls(torch.rand(4, 6))


def detached(func, x, dim, keepdim, **keywords):
    return func(x.held.detach(), dim, keepdim=keepdim, **keywords)


def attached(func, x, dim, keepdim, **keywords):
    return func(x.held, dim, keepdim=keepdim, **keywords)


DETACHED = ["x.sum()", "detached (", "sees none where the rule calls detach()"]
test_a_rule_that_detaches_is_no_refusal = pytest.mark.slow(
    finding(
        {
            "by a row of a padding index, which has no gradient by decision": (
                "inner_gradients",
                mapped(aten.exp, lambda func, x: type(x)(func(x.held.detach()))),
                ["x.exp()"],
                mapped(aten.exp, lambda func, x: type(x)(func(x.held))),
            ),
            "for reductions": (
                "inner_gradients",
                mapped(subclasses.reductions, detached),
                [*DETACHED, "0 by autograd"],
                mapped(subclasses.reductions, attached),
            ),
            "for reductions, with a reference": (
                "inner_gradients",
                mapped(subclasses.reductions, detached),
                [*DETACHED, "0 by autograd"],
                mapped(subclasses.reductions, attached),
                {"reference": unwrapped},
            ),
        }
    )
)


# ---- values of a base ----------------------------------------------------------------------------------------


def heir(make_rows):
    """A class that inherits a rule for rows of its base."""

    def rows(func, x, *args):
        return make_rows(Base, x)(func(x.held, *args))

    Base = declare(name="Base", keywords={"fallback": "map"}, rules={aten.slice: rows})
    return of_tensors(declare(Base, name="Heir"), (4, 6))


HEIR, WRITE = heir(lambda base, x: base), ["write type(x)(...) in place of Base(...)"]
test_an_inherited_rule_that_makes_the_base_is_told_so = pytest.mark.slow(
    finding(
        {
            "a view": (
                "views",
                HEIR,
                ["x[:1] gives a Base, a base of Heir, and not a Heir", *WRITE],
                heir(lambda base, x: type(x)),
            ),
            "a write arrives": ("writes_to_views", None, [], HEIR),
            "of its own class": ("writes_to_views", None, [], heir(lambda base, x: type(x))),
            "with a reference": ("values", HEIR, WRITE, None, {"reference": lambda x: x.held}),
        }
    )
)


@pytest.mark.slow
def test_a_value_of_a_base_is_not_called_a_copy():
    assert "copy" not in outcome(HEIR, "views").detail


# ---- products with a vector ----------------------------------------------------------------------------------

# A diagonal matrix.
Diagonal = declare(
    keywords={"fallback": "materialize"},
    entries=inner(),
    outer=staticmethod(lambda entries: Outer((entries.shape[0], entries.shape[0]))),
    materialize=lambda self: torch.diag(self.entries),
)


def for_vectors(key, side, combine):
    """Values with a rule of its own for a plain vector beside a value, which is the operand of a number."""

    def rule(func, *operands):
        value, vector = operands[side], operands[1 - side]
        if isinstance(value, cls) and not isinstance(vector, cls) and vector.ndim == 1:
            return combine(value.unwrap("entries"), vector)
        return cls.unruled(func, *operands)

    cls = ruled(Diagonal, {key: rule})
    return of_tensors(cls, (4,))


VECTORS = (
    (torch.matmul, 0, "x @ vector"),
    (torch.matmul, 1, "vector @ x"),
    (torch.mv, 0, "torch.mv(x, vector)"),
    (F.linear, 1, "F.linear(vector, x)"),
)
test_a_rule_that_is_wrong_for_a_vector = pytest.mark.sweep(4)(
    finding(
        {
            call: (
                "values",
                for_vectors(key, side, torch.add),
                [
                    f"{call} is not what its reference gives",
                    "correct the result of the rule for such operands",
                ],
                for_vectors(key, side, torch.mul),
            )
            for key, side, call in VECTORS
        }
    )
)
test_a_right_rule_for_a_vector_is_tried = pytest.mark.sweep(4)(
    finding(
        {call: ("rules_tried", None, [], for_vectors(key, side, torch.mul)) for key, side, call in VECTORS}
    )
)


# ---- inner tensors that the reference does not show ----------------------------------------------------------

# Numbers at times, of which the reference shows nothing, with a label or none.
Series = declare(
    name="Series",
    keywords={"fallback": "materialize"},
    held=inner(),
    times=inner(dtype=torch.int64),
    label=inner(optional=True),
    materialize=lambda self: self.held,
)
# The reference shows the integers.
Codes = declare(Series, materialize=lambda self: self.held * self.times[:, None])


def series(base=Series, **rules):
    cls = ruled(base, {getattr(aten, name): rule for name, rule in rules.items()})
    return lambda: cls(torch.randn(4, 6), torch.arange(4), torch.rand(3))


def times_two(func, x, y):
    first, other = (x, y) if isinstance(x, Series) else (y, x)
    return type(first)(func(first.held, getattr(other, "held", other)), first.times, first.label)


def coded_times(func, x, y):
    first, other = (x, y) if isinstance(x, Codes) else (y, x)
    return type(first)(func(first.held, plain(other)), first.times, first.label)


def negative(func, x):
    return type(x)(func(x.held), x.times, x.label)


def negative_at_zero(func, x):
    return type(x)(func(x.held), x.times * 0, x.label)


def negative_without_label(func, x):
    return type(x)(func(x.held), x.times)


test_inner_tensors_that_the_reference_does_not_show = finding(
    {
        "an optional one that a rule drops": (
            "kept_inners",
            series(neg=negative_without_label),
            ["broken: -x loses label", "negative_without_label (", "type(x)(..., white=x.white)"],
            series(neg=negative),
        ),
        "integers that the reference shows": (
            "kept_inners",
            None,
            [],
            series(Codes, neg=lambda func, x: type(x)(x.held, func(x.times), x.label), mul=coded_times),
        ),
    }
)
test_integers_that_one_rule_changes_and_another_keeps = pytest.mark.slow(
    finding(
        {
            "changed": (
                "kept_inners",
                series(neg=negative_at_zero, mul=times_two),
                ["broken: -x changes times, which x * 2 keeps", "negative_at_zero ("],
                series(neg=negative, mul=times_two),
            ),
            "the rule that shares them is not blamed": (
                "own_memory",
                None,
                [],
                series(neg=negative_at_zero, mul=times_two),
            ),
            "where no op keeps them, they may be a count of ops": (
                "kept_inners",
                None,
                [],
                series(neg=negative_at_zero),
            ),
        }
    )
)


# ---- metadata that the reference does not show ---------------------------------------------------------------


def first_unit(func, x, y, alpha=1):
    x, y = (t if isinstance(t, Length) else Length(t) for t in (x, y))
    return Length(func(x.number, y.number, alpha=alpha), unit=x.unit)


def product(func, x, y):
    x, y = (t if isinstance(t, Area) else Area(t, unit="") for t in (x, y))
    return Area(func(x.number, y.number), unit=f"{x.unit}{y.unit}")


def sum_of_one_unit(func, x, y, alpha=1):
    if x.unit != y.unit:
        raise ValueError("areas of one unit can be added")
    return Area(func(x.number, y.number, alpha=alpha), unit=x.unit)


Length = declare(
    keywords={"fallback": "materialize"},
    number=inner(),
    unit=static(default="m"),
    materialize=lambda self: self.number,
    rules={aten.add: first_unit},
)
# The unit of a product differs from both units.
Area = declare(Length, rules={aten.mul: product, aten.add: sum_of_one_unit})


def length(cls=Length, unit="m"):
    return lambda: cls(torch.rand(4, 6), unit=unit)


@pytest.mark.parametrize("order", [1, -1])
def test_metres_and_kilometres_need_a_reference_that_tells_them_apart(order):
    one, other = ("m", "km")[::order]
    make, variants = length(unit=one), [length(unit=other)]
    found = outcome(make, "mixed_metadata", variants=variants)
    assert found.state == "skipped"
    assert found.detail.startswith(
        f"pass reference=, which distinguishes values with unit='{other}' from others"
    )
    reference = lambda x: x.unwrap("number") * {"m": 1, "km": 1000}[x.unit]  # noqa: E731
    words = [f"x + y, y with unit='{other}'"]
    check_found(make, "mixed_metadata", words, variants=variants, reference=reference)


def test_units_that_are_multiplied_or_refused_need_no_reference():
    check_kept(length(Area), "mixed_metadata", variants=[length(Area, "km")])


# ---- results that are kept -----------------------------------------------------------------------------------


def cached(func, x):
    return type(x)(func(x.held))


def by_id():
    found: dict[int, Tensor] = {}

    def rule(func, x):
        return type(x)(found.setdefault(id(x), func(x.held)))

    return rule


@pytest.mark.slow
@pytest.mark.parametrize("rule", [functools.lru_cache(cached), by_id()])
def test_a_rule_that_keeps_its_result(rule):
    words = [
        "broken: x.exp(), called again after a write to inner tensors of x: held",
        f"{rule.__qualname__} (",
        "Leave the cache out",
    ]
    check_found(mapped(aten.exp, rule), "fresh_results", words)
    check_kept(mapped(aten.exp, cached), "fresh_results")


def test_results_are_asked_for_anew_without_a_write_to_what_the_factory_holds():
    held = torch.ones(4, 6)
    cls = type(mapped(aten.exp, cached)())
    outcome(lambda: cls(held), "fresh_results")
    assert torch.equal(held, torch.ones(4, 6))


# ---- names ---------------------------------------------------------------------------------------------------


Turned = declare(
    name="Turned",
    keywords={"fallback": "materialize"},
    held=inner(differentiable=True),
    materialize=lambda self: self.held,
)


@pytest.mark.slow
def test_a_property_is_called_and_named_by_its_name():
    rules = {
        Tensor.T.__get__: lambda func, x: x.unwrap("held") * 2,
        Tensor.is_sparse.__get__: lambda func, x: False,
    }
    make = of_tensors(ruled(Turned, rules), (4, 6))
    check_found(make, "values", ["broken: x.T is not what its reference gives: shape [4, 6]"])
    assert "not called: Tensor.is_sparse;" in outcome(make, "rules_tried").detail
    check_found(
        make,
        "values",
        ["broken: Tensor.T is not what its reference gives: shape [4, 6]"],
        ops={Tensor.T.__get__: lambda x: (x,)},
    )


def test_fields_and_inner_tensors_are_shown_by_their_names():
    report = examine(of_tensors(Turned, (4, 6)), paths={}, skip=only("op_infos_agree"))
    assert "wrap= from Turned(held)" in str(report)
    cls = ruled(Turned, {aten.abs: lambda func, x: type(x)(x.held.abs_())})
    check_found(of_tensors(cls, (4, 6)), "arguments", ["broken: x.abs() changed x: held: "])


# ---- embeddings, and sizes that change late --------------------------------------------------------------------


# Rows of a table, by their indices.
Shared = declare(
    keywords={"fallback": "materialize"},
    rows=inner(shape="k d"),
    index=inner(dtype=torch.int64, shape="n"),
    outer=staticmethod(lambda rows, index: Outer((index.shape[0], rows.shape[1]))),
    materialize=lambda self: self.rows[self.index],
)


def embedding(index_of):
    def rule(func, ids, x, *rest, **keywords):
        return func(index_of(ids, x), x.unwrap("rows"), *rest, **keywords)

    cls = ruled(Shared, {F.embedding: rule})
    return lambda: cls(torch.randn(6, 4), torch.tensor([0, 2, 1, 2, 0, 1]))


@pytest.mark.slow
def test_an_embedding_that_forgets_the_index_is_found():
    """Row 0 of the value is row 0 of the table."""
    check_found(embedding(lambda ids, x: ids), "values", ["F.embedding(i, x)", "rule ("])
    check_kept(embedding(lambda ids, x: x.index[ids]), "values")


@pytest.mark.slow
def test_an_inner_size_that_changes_in_the_last_of_sizes_makes_a_new_program():
    first, *sizes = (
        functools.partial(lambda k, n: Shared(torch.randn(k, 4), torch.randint(k, (n,))), *size)
        for size in ((3, 6), (3, 7), (5, 9))
    )
    report = examine(first, sizes=sizes, skip=only("dynamic_shapes"))
    assert not report.broken, report.details()


# ---- metadata that one rule forgets --------------------------------------------------------------------------


def mirrored(forgets):
    def kept(x, name):
        return {} if name == forgets else {"negative": x.negative}

    def cat(func, xs, dim=0):
        if not all(isinstance(x, Mirrored) and x.negative == xs[0].negative for x in xs):
            return func([plain(x) for x in xs], dim)
        return Mirrored(func([x.held for x in xs], dim), **kept(xs[0], "cat"))

    def flip(func, x, dims):
        if list(dims) != [-1]:
            return func(x.materialize(), dims)
        return Mirrored(func(x.held, dims), **kept(x, "flip"))

    Mirrored = declare(
        keywords={"fallback": "materialize"},
        held=inner(),
        negative=static(default=False),
        annotations={"held": Tensor, "negative": bool},
        materialize=lambda self: -self.held if self.negative else self.held * 1,
        rules={aten.cat: cat, aten.flip: flip},
    )
    return Mirrored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgets", "call"), [("cat", "torch.cat([x, x])"), ("flip", "x.flip(-1)"), (None, None)]
)
def test_metadata_that_one_rule_forgets_is_found_by_a_derived_variant(forgets, call):
    report = examine(of_tensors(mirrored(forgets), (3, 4)), paths={})
    if forgets:
        assert f"{call} with negative=True" in report.details() and "other_metadata" in report.broken
    else:
        assert not report.broken and "variants= from negative=True" in str(report)


# ---- metadata of an operand taken for granted: found with the factories of variants= -----------------------

Quantity = declare(
    name="Quantity",
    number=inner(),
    unit=static(default=1.0),
    digits=dynamic(default=3),
    annotations={"unit": float},
    materialize=lambda self: self.number * self.unit,
    keywords={"fallback": "materialize"},
)


def make(cls, **metadata):
    return cls(torch.randn(4, 6), **metadata)


def variants_of(cls, **metadata):
    return [functools.partial(make, cls, **(metadata or {"unit": 1000.0}))]


def without_unit(func, x):
    return type(x)(func(x.number))


def adding(converts, refuses=False):
    def add(func, x, y, alpha=1):
        if not (isinstance(x, Quantity) and isinstance(y, Quantity)):
            return NotImplemented
        if refuses and x.unit != y.unit:
            raise ValueError("lengths of one unit can be added")
        return type(x)(x.number + alpha * y.number * (y.unit / x.unit if converts else 1), unit=x.unit)

    return add


def joining(converts):
    def join(func, tensors, dim=0):
        unit = tensors[0].unit
        numbers = [t.number * (t.unit / unit if converts else 1) for t in tensors]
        return type(tensors[0])(func(numbers, dim), unit=unit)

    return join


# The promise, the op of the rule, the wrong rule, right ones, words of the report.
FAULTS = {
    "a unit forgotten": (
        "other_metadata",
        aten.abs.default,
        without_unit,
        [lambda func, x: type(x)(func(x.number), unit=x.unit)],
        ["x.abs() with unit=1000.0 is not what its reference gives", "pass each field on"],
    ),
    "numbers of two units added": (
        "mixed_metadata",
        aten.add.Tensor,
        adding(converts=False),
        [adding(converts=True), adding(converts=False, refuses=True)],
        ["x + y, y with unit=1000.0 is not what", "convert one of them where they differ, or refuse the op"],
    ),
    "numbers of two units joined": (
        "mixed_metadata",
        aten.cat.default,
        joining(converts=False),
        [joining(converts=True)],
        ["torch.cat([x, y]), y with unit=1000.0"],
    ),
}


def of_length(key=None, rule=None, base=Quantity):
    cls = ruled(base, {} if rule is None else {key: rule})
    return functools.partial(make, cls)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_taken_for_granted_is_found(fault):
    promise, key, wrong, right, words = FAULTS[fault]
    cls = ruled(Quantity, {key: wrong})
    check_found(functools.partial(make, cls), promise, words, variants=variants_of(cls))
    for rule in right:
        cls = ruled(Quantity, {key: rule})
        check_kept(functools.partial(make, cls), promise, variants=variants_of(cls))


def test_without_variants_nothing_is_tried():
    found = outcome(of_length(aten.abs.default, without_unit), "other_metadata", variants=[])
    assert found.state == "skipped" and "pass variants=" in found.detail


Signed = declare(
    Quantity,
    negative=static(default=False),
    annotations={"negative": bool},
    materialize=lambda self: Quantity.materialize(self) * (-1 if self.negative else 1),
)


@pytest.mark.slow
def test_a_rule_that_is_wrong_for_a_derived_variant_is_found():
    rule = lambda func, x: type(x)(func(x.number), unit=x.unit, negative=x.negative)  # noqa: E731
    words = ["x.abs() with negative=True is not what its reference gives"]
    check_found(of_length(aten.abs.default, rule, Signed), "other_metadata", words, variants=[])


@pytest.mark.slow
def test_a_default_in_place_of_an_operands_metadata_is_found_where_the_reference_does_not_tell():
    def options(cls):
        return {"reference": lambda x: x.number, "variants": variants_of(cls, unit=1000.0, digits=5)}

    cls = ruled(Quantity, {aten.abs.default: without_unit})
    words = ["x.abs() has the default unit=1.0, not 1000.0, digits=3, not 5", "pass each field on"]
    check_found(functools.partial(make, cls), "kept_metadata", words, **options(cls))
    check_kept(functools.partial(make, Quantity), "kept_metadata", **options(Quantity))


# ---- tensors that materialize() keeps --------------------------------------------------------------------------


def kept_on_value(self):
    if "whole" not in self.__dict__:
        self.__dict__["whole"] = Quantity.materialize(self)
    return self.__dict__["whole"]


Labels = declare(
    labels=inner(dtype=torch.int64),
    like=inner(),
    whole=lambda self: self.labels.to(self.dtype),
    materialize=lambda self: self.whole().clone(),
    keywords={"fallback": "materialize", "dtype_from": "like"},
)


def until_written(self):
    """Looks at the version of its labels, which an assignment replaces by others."""
    kept = self.__dict__.get("kept", (None, None))
    if kept[0] != self.labels._version:
        kept = self.__dict__["kept"] = self.labels._version, Labels.materialize(self)
    return kept[1].clone()


class CachedProperty(Labels):
    @functools.cached_property
    def kept(self):
        return self.whole()

    def materialize(self):
        return self.kept.clone()


COPY = ["x.materialize() after a copy_ to each inner tensor", "cached_property or lru_cache"]
KEPT = {
    declare(
        Labels, name="Kept", materialize=lambda self: self.__dict__.setdefault("kept", self.whole())
    ): COPY,
    CachedProperty: COPY,
    declare(Labels, name="CachedMethod", whole=functools.lru_cache(Labels.whole)): COPY,
    declare(Labels, name="UntilWritten", materialize=until_written): [
        "x.materialize() after an assignment of each field"
    ],
}


test_what_materialize_keeps_is_found = pytest.mark.slow(
    finding(
        {
            "of numbers": (
                "fresh_values",
                functools.partial(make, declare(Quantity, materialize=kept_on_value)),
                ["stale after an optimizer's step"],
                functools.partial(make, Quantity),
            )
        }
    )
)


def labels(cls):
    return lambda: cls(torch.randint(9, (4, 6)), torch.zeros(4, 6))


test_what_is_kept_of_integers_is_found = pytest.mark.sweep(4)(
    finding(
        {cls.__name__: ("fresh_values", labels(cls), words, labels(Labels)) for cls, words in KEPT.items()}
    )
)
