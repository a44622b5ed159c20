"""Faults that an author planted and the kit did not see, and right classes that it blamed."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subclasses
from subclasses import Outer, TensorSubclass, inner, static
from subclasses.testing import examine
from subclasses.testing.runner import PROMISES

aten = torch.ops.aten


def outcome(make, promise, **options):
    others = {p.name for p in PROMISES} - {promise, "readable"}
    report = examine(make, paths={}, skip=others, **options)
    return next(o for o in report.outcomes if o.promise.name == promise)


# ---- gradients that are no slopes ----------------------------------------------------------------------------


class Mapped(TensorSubclass, fallback="map"):
    """With a rule, so that it has no reference: gradients are compared with differences."""

    held: Tensor = inner()


def mapped(key, rule):
    cls = type("Ruled", (Mapped,), {"__doc__": "One rule."}, fallback="map")
    cls.implements(key)(rule)
    return lambda: cls(torch.rand(4, 6))


@pytest.mark.slow
def test_the_row_of_a_padding_index_has_no_gradient_by_decision():
    found = outcome(mapped(aten.exp, lambda func, x: type(x)(func(x.held))), "inner_gradients")
    assert found.state == "kept", found
    found = outcome(mapped(aten.exp, lambda func, x: type(x)(func(x.held.detach()))), "inner_gradients")
    assert found.state == "broken" and "x.exp()" in found.detail


@pytest.mark.slow
@pytest.mark.parametrize("reference", [None, lambda x: x.unwrap("held")])
def test_a_rule_for_reductions_that_detaches_is_no_refusal(reference):
    def detached(func, x, dim, keepdim, **keywords):
        return func(x.held.detach(), dim, keepdim=keepdim, **keywords)

    def right(func, x, dim, keepdim, **keywords):
        return func(x.held, dim, keepdim=keepdim, **keywords)

    found = outcome(mapped(subclasses.reductions, detached), "inner_gradients", reference=reference)
    assert found.state == "broken" and "x.sum() is refused: the slope" in found.detail
    assert "detached (" in found.mend and "computes its result without derivatives" in found.mend
    found = outcome(mapped(subclasses.reductions, right), "inner_gradients", reference=reference)
    assert found.state == "kept", found


def test_what_has_no_slope_may_refuse_its_gradient():
    def rounded(func, x, *args, **keywords):
        return func(x.held.detach().round(), *args, **keywords)

    make = mapped(aten.cumsum, rounded)
    found = outcome(make, "inner_gradients", reference=lambda x: x.unwrap("held"))
    assert found.state == "kept", found
    assert any("its derivative is asked for" in line for line in found.refused)


# ---- values of a base ----------------------------------------------------------------------------------------


def heir(make_rows):
    """A class that inherits a rule for rows of its base."""

    class Base(TensorSubclass, fallback="map"):
        held: Tensor = inner()

    @Base.implements(aten.slice)
    def rows(func, x, *args):
        return make_rows(Base, x)(func(x.held, *args))

    class Heir(Base, fallback="map"):
        pass

    return lambda: Heir(torch.randn(4, 6))


@pytest.mark.slow
def test_an_inherited_rule_that_makes_the_base_is_told_so():
    make = heir(lambda base, x: base)
    found = outcome(make, "views")
    assert found.state == "broken" and "x[:1] gives a Base, a base of Heir, and not a Heir" in found.detail
    assert "copy" not in found.detail
    assert "rows (" in found.mend and "write type(x)(...) in place of Base(...)" in found.mend
    assert outcome(make, "mutation_of_views").state == "kept"  # the write arrives
    for promise in ("values", "nested_inside"):  # with and without what the value stands for
        found = outcome(make, promise, reference=lambda x: x.held)
        assert found.state == "broken" and "gives a Base, a base of Heir" in found.detail
        assert "rows (" in found.mend and "write type(x)(...) in place of Base(...)" in found.mend
    for promise in ("views", "mutation_of_views"):
        assert outcome(heir(lambda base, x: type(x)), promise).state == "kept"


# ---- products with a vector ----------------------------------------------------------------------------------


class Diagonal(TensorSubclass, fallback="materialize"):
    """A diagonal matrix."""

    entries: Tensor = inner()

    @staticmethod
    def outer(entries):
        return Outer((entries.shape[0], entries.shape[0]))

    def materialize(self):
        return torch.diag(self.entries)


def diagonal(key, rule):
    cls = type("Ruled", (Diagonal,), {"__doc__": "One rule."}, fallback="materialize")
    cls.implements(key)(functools.partial(rule, cls))
    return lambda: cls(torch.rand(4))


def left_of_vector(combine):
    def rule(cls, func, x, y):
        if isinstance(x, cls) and not isinstance(y, cls) and y.ndim == 1:
            return combine(x.unwrap("entries"), y)
        return cls.unruled(func, x, y)

    return rule


def right_of_vector(combine):
    def rule(cls, func, x, y):
        if isinstance(y, cls) and not isinstance(x, cls) and x.ndim == 1:
            return combine(x, y.unwrap("entries"))
        return cls.unruled(func, x, y)

    return rule


def linear(combine):
    def rule(cls, func, x, weight, bias=None):
        if isinstance(weight, cls) and not isinstance(x, cls) and x.ndim == 1:
            return combine(x, weight.unwrap("entries"))
        return cls.unruled(func, x, weight, bias)

    return rule


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("key", "rule", "call"),
    [
        (torch.matmul, left_of_vector, "x @ vector"),
        (torch.matmul, right_of_vector, "vector @ x"),
        (torch.mv, left_of_vector, "torch.mv(x, vector)"),
        (F.linear, linear, "F.linear(vector, x)"),
    ],
)
def test_a_rule_that_is_wrong_for_a_vector(key, rule, call):
    found = outcome(diagonal(key, rule(torch.add)), "values")
    assert found.state == "broken" and f"{call} is not what its reference gives" in found.detail
    assert "correct what the rule gives for such operands" in found.mend
    found = outcome(diagonal(key, rule(torch.mul)), "values")
    assert found.state == "kept", found
    found = outcome(diagonal(key, rule(torch.mul)), "rules_tried")
    assert found.state == "kept", found


# ---- inner tensors that the reference does not show ----------------------------------------------------------


class Series(TensorSubclass, fallback="materialize"):
    """Numbers at times, of which the reference shows nothing, with a label or none."""

    held: Tensor = inner()
    times: Tensor = inner(dtype=torch.int64)
    label: Tensor | None = inner(optional=True)

    def materialize(self):
        return self.held


def series(**rules):
    cls = type("Ruled", (Series,), {"__doc__": "Some rules."}, fallback="materialize")
    for name, rule in rules.items():
        cls.implements(getattr(aten, name))(rule)
    return lambda: cls(torch.randn(4, 6), torch.arange(4), torch.rand(3))


def numbers(t):
    return t.held if isinstance(t, Series) else t


def times_two(func, x, y):
    first = x if isinstance(x, Series) else y
    return type(first)(func(numbers(x), numbers(y)), first.times, first.label)


def negative(func, x):
    return type(x)(func(x.held), x.times, x.label)


def negative_at_zero(func, x):
    return type(x)(func(x.held), x.times * 0, x.label)


def negative_without_label(func, x):
    return type(x)(func(x.held), x.times)


def test_an_optional_inner_tensor_that_a_rule_drops():
    found = outcome(series(neg=negative_without_label), "kept_inners")
    assert found.state == "broken" and found.detail.startswith("-x loses label")
    assert "negative_without_label (" in found.mend and "type(x)(..., white=x.white)" in found.mend
    assert outcome(series(neg=negative), "kept_inners").state == "kept"


@pytest.mark.slow
def test_integers_that_one_rule_changes_and_another_keeps():
    found = outcome(series(neg=negative_at_zero, mul=times_two), "kept_inners")
    assert found.state == "broken" and found.detail.startswith("-x changes times, which x * 2 keeps")
    assert "negative_at_zero (" in found.mend
    assert outcome(series(neg=negative, mul=times_two), "kept_inners").state == "kept"
    # where no op keeps them, they may be a count of ops
    assert outcome(series(neg=negative_at_zero), "kept_inners").state == "kept"


@pytest.mark.slow
def test_a_rule_that_shares_integers_is_not_blamed_for_another_that_changes_them():
    assert outcome(series(neg=negative_at_zero, mul=times_two), "own_memory").state == "kept"


class Codes(Series, fallback="materialize"):
    """The reference shows the integers."""

    def materialize(self):
        return self.held * self.times[:, None]


@Codes.implements(aten.neg)
def _(func, x):
    return Codes(x.held, func(x.times), x.label)


@Codes.implements(aten.mul)
def _(func, x, y):
    first, other = (x, y) if isinstance(x, Codes) else (y, x)
    other = other.materialize() if isinstance(other, Codes) else other
    return Codes(func(first.held, other), first.times, first.label)


def test_integers_that_the_reference_shows_may_change():
    assert outcome(lambda: Codes(torch.randn(4, 6), torch.arange(4)), "kept_inners").state == "kept"


# ---- metadata that the reference does not show ---------------------------------------------------------------


class Length(TensorSubclass, fallback="materialize"):
    number: Tensor = inner()
    unit: str = static(default="m")

    def materialize(self):
        return self.number


@Length.implements(aten.add)
def _(func, x, y, alpha=1):
    x, y = (t if isinstance(t, Length) else Length(t) for t in (x, y))
    return Length(func(x.number, y.number, alpha=alpha), unit=x.unit)


@pytest.mark.parametrize("order", [1, -1])
def test_metres_and_kilometres_need_a_reference_that_tells_them_apart(order):
    units = ("m", "km")[::order]
    make = lambda: Length(torch.rand(4, 6), unit=units[0])  # noqa: E731
    variants = [lambda: Length(torch.rand(4, 6), unit=units[1])]
    found = outcome(make, "mixed_metadata", variants=variants)
    assert found.state == "skipped"
    assert found.detail.startswith(f"pass reference=, which tells values with unit='{units[1]}' from others")
    found = outcome(
        make,
        "mixed_metadata",
        variants=variants,
        reference=lambda x: x.unwrap("number") * {"m": 1, "km": 1000}[x.unit],
    )
    assert found.state == "broken" and f"x + y, y with unit='{units[1]}'" in found.detail


class Area(Length, fallback="materialize"):
    """The unit of a product is that of neither."""


@Area.implements(aten.mul)
def _(func, x, y):
    x, y = (t if isinstance(t, Area) else Area(t, unit="") for t in (x, y))
    return Area(func(x.number, y.number), unit=f"{x.unit}{y.unit}")


@Area.implements(aten.add)
def _(func, x, y, alpha=1):
    if x.unit != y.unit:
        raise ValueError("areas of one unit can be added")
    return Area(func(x.number, y.number, alpha=alpha), unit=x.unit)


def test_units_that_are_multiplied_or_refused_need_no_reference():
    found = outcome(
        lambda: Area(torch.rand(4, 6)),
        "mixed_metadata",
        variants=[lambda: Area(torch.rand(4, 6), unit="km")],
    )
    assert found.state == "kept", found


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
    found = outcome(mapped(aten.exp, rule), "fresh_results")
    assert found.state == "broken"
    assert found.detail.startswith("x.exp(), called again after a write to inner tensors of x: held")
    assert f"{rule.__qualname__} (" in found.mend and "Leave the cache out" in found.mend
    assert outcome(mapped(aten.exp, cached), "fresh_results").state == "kept"


def test_results_are_asked_for_anew_without_a_write_to_what_the_factory_holds():
    held = torch.ones(4, 6)
    cls = type(mapped(aten.exp, cached)())
    outcome(lambda: cls(held), "fresh_results")
    assert torch.equal(held, torch.ones(4, 6))


# ---- names ---------------------------------------------------------------------------------------------------


class Turned(TensorSubclass, fallback="materialize"):
    held: Tensor = inner(differentiable=True)

    def materialize(self):
        return self.held


@pytest.mark.slow
def test_a_property_is_called_and_named_by_its_name():
    cls = type("Ruled", (Turned,), {"__doc__": "Two rules."}, fallback="materialize")
    cls.implements(Tensor.T.__get__)(lambda func, x: x.unwrap("held") * 2)
    cls.implements(Tensor.is_sparse.__get__)(lambda func, x: False)
    make = lambda: cls(torch.randn(4, 6))  # noqa: E731
    found = outcome(make, "values")
    assert found.state == "broken" and found.detail.startswith("x.T has shape [4, 6]")
    found = outcome(make, "rules_tried")
    assert "not called: Tensor.is_sparse;" in found.detail
    found = outcome(make, "values", ops={Tensor.T.__get__: lambda x: (x,)})
    assert found.detail.startswith("Tensor.T has shape [4, 6]")


def test_a_field_is_shown_by_its_name():
    others = {p.name for p in PROMISES} - {"op_infos_agree", "readable"}
    report = examine(lambda: Turned(torch.randn(4, 6)), paths={}, skip=others)
    assert "wrap= from Turned(held)" in str(report)


def test_an_inner_tensor_in_a_message_is_shown_by_its_name():
    cls = type("Ruled", (Turned,), {"__doc__": "One rule."}, fallback="materialize")
    cls.implements(aten.abs)(lambda func, x: cls(x.held.abs_()))
    found = outcome(lambda: cls(torch.randn(4, 6)), "arguments")
    assert found.detail.startswith("x.abs() changed x: held: ")


# ---- embeddings, and sizes that change late --------------------------------------------------------------------


class Shared(TensorSubclass, fallback="materialize"):
    """Rows of a table, by their indices."""

    rows: Tensor = inner(shape="k d")
    index: Tensor = inner(dtype=torch.int64, shape="n")

    @staticmethod
    def outer(rows, index):
        return Outer((index.shape[0], rows.shape[1]))

    def materialize(self):
        return self.rows[self.index]


def embedding(cls, index_of):
    made = type("Ruled", (cls,), {"__doc__": "One rule."}, fallback="materialize")

    @made.implements(F.embedding)
    def rule(func, ids, x, *rest, **keywords):
        return func(index_of(ids, x), x.unwrap("rows"), *rest, **keywords)

    return lambda: made(torch.randn(6, 4), torch.tensor([0, 2, 1, 2, 0, 1]))


@pytest.mark.slow
def test_an_embedding_that_forgets_the_index_is_found():
    """Row 0 of the value is row 0 of the table."""
    found = outcome(embedding(Shared, lambda ids, x: ids), "values")
    assert found.state == "broken" and "F.embedding(i, x)" in found.detail and "rule (" in found.mend
    found = outcome(embedding(Shared, lambda ids, x: x.index[ids]), "values")
    assert found.state == "kept", found


@pytest.mark.slow
def test_an_inner_size_that_changes_in_the_last_of_sizes_makes_a_new_program():
    def make(k=3, n=6):
        return Shared(torch.randn(k, 4), torch.randint(k, (n,)))

    report = examine(
        make,
        sizes=[lambda: make(3, 7), lambda: make(5, 9)],
        skip={p.name for p in PROMISES} - {"dynamic_shapes"},
    )
    assert not report.broken, report.details()


# ---- metadata that one rule forgets --------------------------------------------------------------------------


def mirrored(forgets):
    class Mirrored(TensorSubclass, fallback="materialize"):
        held: Tensor = inner()
        negative: bool = static(default=False)

        def materialize(self):
            return -self.held if self.negative else self.held * 1

    def kept(x, name):
        return {} if name == forgets else {"negative": x.negative}

    @Mirrored.implements(aten.cat)
    def _(func, xs, dim=0):
        if not all(isinstance(x, Mirrored) and x.negative == xs[0].negative for x in xs):
            return func([x.materialize() if isinstance(x, Mirrored) else x for x in xs], dim)
        return Mirrored(func([x.held for x in xs], dim), **kept(xs[0], "cat"))

    @Mirrored.implements(aten.flip)
    def _(func, x, dims):
        if list(dims) != [-1]:
            return func(x.materialize(), dims)
        return Mirrored(func(x.held, dims), **kept(x, "flip"))

    return Mirrored


@pytest.mark.slow
@pytest.mark.parametrize(("forgets", "call"), [("cat", "torch.cat([x, x])"), ("flip", "x.flip(-1)")])
def test_metadata_that_one_rule_forgets_is_found_by_a_derived_variant(forgets, call):
    cls = mirrored(forgets)
    report = examine(lambda: cls(torch.randn(3, 4)), paths={})
    assert f"{call} with negative=True" in report.details()
    assert "other_metadata" in report.broken


@pytest.mark.slow
def test_a_class_that_forgets_none_is_kept_with_a_derived_variant():
    cls = mirrored(None)
    report = examine(lambda: cls(torch.randn(3, 4)), paths={})
    assert not report.broken and "variants= from negative=True" in str(report)
