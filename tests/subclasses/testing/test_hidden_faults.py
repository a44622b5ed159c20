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
from tests.subclasses.testing.faults import check_found, check_kept, of_tensors, only, outcome, plain, ruled

aten = torch.ops.aten


def unwrapped(x):
    return x.unwrap("held")


# ---- gradients that are no slopes ----------------------------------------------------------------------------


class Mapped(TensorSubclass, fallback="map"):
    """With a rule, so that it has no reference: gradients are compared with differences."""

    held: Tensor = inner()


def mapped(key, rule):
    cls = ruled(Mapped, {key: rule}, fallback="map")
    return lambda: cls(torch.rand(4, 6))


@pytest.mark.slow
def test_the_row_of_a_padding_index_has_no_gradient_by_decision():
    check_kept(mapped(aten.exp, lambda func, x: type(x)(func(x.held))), "inner_gradients")
    wrong = mapped(aten.exp, lambda func, x: type(x)(func(x.held.detach())))
    check_found(wrong, "inner_gradients", ["x.exp()"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "words"), [(None, "and 0 by autograd"), (unwrapped, "does not require grad")]
)
def test_a_rule_for_reductions_that_detaches_is_no_refusal(reference, words):
    def detached(func, x, dim, keepdim, **keywords):
        return func(x.held.detach(), dim, keepdim=keepdim, **keywords)

    words = ["x.sum()", words, "detached (", "uses detach, behind which gradients are lost"]
    check_found(mapped(subclasses.reductions, detached), "inner_gradients", words, reference=reference)
    right = mapped(
        subclasses.reductions,
        lambda func, x, dim, keepdim, **keywords: func(x.held, dim, keepdim=keepdim, **keywords),
    )
    check_kept(right, "inner_gradients", reference=reference)


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
    words = ["gives a Base, a base of Heir", "rows (", "write type(x)(...) in place of Base(...)"]
    check_found(make, "views", ["x[:1] gives a Base, a base of Heir, and not a Heir", *words])
    assert "copy" not in outcome(make, "views").detail
    check_kept(make, "mutation_of_views")  # the write arrives
    for promise in ("values", "nested_inside"):  # with and without what the value stands for
        check_found(make, promise, words, reference=lambda x: x.held)
    check_kept(heir(lambda base, x: type(x)), "views", "mutation_of_views")


# ---- products with a vector ----------------------------------------------------------------------------------


class Diagonal(TensorSubclass, fallback="materialize"):
    """A diagonal matrix."""

    entries: Tensor = inner()

    @staticmethod
    def outer(entries):
        return Outer((entries.shape[0], entries.shape[0]))

    def materialize(self):
        return torch.diag(self.entries)


def for_vectors(side, combine):
    """A rule of its own for a plain vector beside a value, which is the operand of a number."""

    def rule(cls, func, *operands):
        value, vector = operands[side], operands[1 - side]
        if isinstance(value, cls) and not isinstance(vector, cls) and vector.ndim == 1:
            return combine(value.unwrap("entries"), vector)
        return cls.unruled(func, *operands)

    return rule


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("key", "side", "call"),
    [
        (torch.matmul, 0, "x @ vector"),
        (torch.matmul, 1, "vector @ x"),
        (torch.mv, 0, "torch.mv(x, vector)"),
        (F.linear, 1, "F.linear(vector, x)"),
    ],
)
def test_a_rule_that_is_wrong_for_a_vector(key, side, call):
    def made(combine):
        cls = ruled(Diagonal, {})
        cls.implements(key)(functools.partial(for_vectors(side, combine), cls))
        return of_tensors(cls, (4,))

    words = [
        f"{call} is not what its reference gives",
        "correct what the rule gives for such operands",
    ]
    check_found(made(torch.add), "values", words)
    check_kept(made(torch.mul), "values", "rules_tried")


# ---- inner tensors that the reference does not show ----------------------------------------------------------


class Series(TensorSubclass, fallback="materialize"):
    """Numbers at times, of which the reference shows nothing, with a label or none."""

    held: Tensor = inner()
    times: Tensor = inner(dtype=torch.int64)
    label: Tensor | None = inner(optional=True)

    def materialize(self):
        return self.held


def series(base=Series, **rules):
    cls = ruled(base, {getattr(aten, name): rule for name, rule in rules.items()})
    return lambda: cls(torch.randn(4, 6), torch.arange(4), torch.rand(3))


def times_two(func, x, y):
    first = x if isinstance(x, Series) else y
    other = y if first is x else x
    return type(first)(func(first.held, getattr(other, "held", other)), first.times, first.label)


def negative(func, x):
    return type(x)(func(x.held), x.times, x.label)


def negative_at_zero(func, x):
    return type(x)(func(x.held), x.times * 0, x.label)


def negative_without_label(func, x):
    return type(x)(func(x.held), x.times)


def test_an_optional_inner_tensor_that_a_rule_drops():
    words = ["broken: -x loses label", "negative_without_label (", "type(x)(..., white=x.white)"]
    check_found(series(neg=negative_without_label), "kept_inners", words)
    check_kept(series(neg=negative), "kept_inners")


@pytest.mark.slow
def test_integers_that_one_rule_changes_and_another_keeps():
    wrong = series(neg=negative_at_zero, mul=times_two)
    check_found(wrong, "kept_inners", ["broken: -x changes times, which x * 2 keeps", "negative_at_zero ("])
    check_kept(wrong, "own_memory")  # the rule that shares them is not blamed
    check_kept(series(neg=negative, mul=times_two), "kept_inners")
    # where no op keeps them, they may be a count of ops
    check_kept(series(neg=negative_at_zero), "kept_inners")


class Codes(Series, fallback="materialize"):
    """The reference shows the integers."""

    def materialize(self):
        return self.held * self.times[:, None]


def coded_times(func, x, y):
    first, other = (x, y) if isinstance(x, Codes) else (y, x)
    return type(first)(func(first.held, plain(other)), first.times, first.label)


def test_integers_that_the_reference_shows_may_change():
    rules = {"neg": lambda func, x: type(x)(x.held, func(x.times), x.label), "mul": coded_times}
    check_kept(series(Codes, **rules), "kept_inners")


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


def length(cls=Length, unit="m"):
    return lambda: cls(torch.rand(4, 6), unit=unit)


@pytest.mark.parametrize("order", [1, -1])
def test_metres_and_kilometres_need_a_reference_that_tells_them_apart(order):
    one, other = ("m", "km")[::order]
    make, variants = length(unit=one), [length(unit=other)]
    found = outcome(make, "mixed_metadata", variants=variants)
    assert found.state == "skipped"
    assert found.detail.startswith(f"pass reference=, which tells values with unit='{other}' from others")
    reference = lambda x: x.unwrap("number") * {"m": 1, "km": 1000}[x.unit]  # noqa: E731
    words = [f"x + y, y with unit='{other}'"]
    check_found(make, "mixed_metadata", words, variants=variants, reference=reference)


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


class Turned(TensorSubclass, fallback="materialize"):
    held: Tensor = inner(differentiable=True)

    def materialize(self):
        return self.held


@pytest.mark.slow
def test_a_property_is_called_and_named_by_its_name():
    rules = {
        Tensor.T.__get__: lambda func, x: x.unwrap("held") * 2,
        Tensor.is_sparse.__get__: lambda func, x: False,
    }
    make = of_tensors(ruled(Turned, rules), (4, 6))
    check_found(make, "values", ["broken: x.T has shape [4, 6]"])
    assert "not called: Tensor.is_sparse;" in outcome(make, "rules_tried").detail
    check_found(make, "values", ["broken: Tensor.T has shape [4, 6]"], ops={Tensor.T.__get__: lambda x: (x,)})


def test_fields_and_inner_tensors_are_shown_by_their_names():
    report = examine(of_tensors(Turned, (4, 6)), paths={}, skip=only("op_infos_agree"))
    assert "wrap= from Turned(held)" in str(report)
    cls = ruled(Turned, {aten.abs: lambda func, x: type(x)(x.held.abs_())})
    check_found(of_tensors(cls, (4, 6)), "arguments", ["broken: x.abs() changed x: held: "])


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


@pytest.mark.slow
def test_an_embedding_that_forgets_the_index_is_found():
    """Row 0 of the value is row 0 of the table."""

    def embedding(index_of):
        def rule(func, ids, x, *rest, **keywords):
            return func(index_of(ids, x), x.unwrap("rows"), *rest, **keywords)

        cls = ruled(Shared, {F.embedding: rule})
        return lambda: cls(torch.randn(6, 4), torch.tensor([0, 2, 1, 2, 0, 1]))

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
@pytest.mark.parametrize(
    ("forgets", "call"), [("cat", "torch.cat([x, x])"), ("flip", "x.flip(-1)"), (None, None)]
)
def test_metadata_that_one_rule_forgets_is_found_by_a_derived_variant(forgets, call):
    report = examine(of_tensors(mirrored(forgets), (3, 4)), paths={})
    if forgets:
        assert f"{call} with negative=True" in report.details() and "other_metadata" in report.broken
    else:
        assert not report.broken and "variants= from negative=True" in str(report)
