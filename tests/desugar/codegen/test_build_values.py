"""Text that builds results: one constructor call and one store per inner tensor, constants written in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from desugar.codegen.build_values import (
    emit_constant,
    emit_graph_call,
    emit_int,
    emit_ints,
    emit_value,
    zeros_expression,
)
from desugar.ir.fx_utils import output_nodes
from desugar.ir.values import Constant, Flat, Plain, Same, Slot, unwrap_value
from subclasses.codegen.emitter import Emitter
from tests.desugar.classes import (
    EVERY,
    HAND_WRITTEN,
    Labeled,
    Nested,
    Pair,
    Tagged,
    make,
    metadata,
    plain_parts,
)


def built(cls, *, value=None):
    """(text, the result of running it on the parts of a wrapper, that wrapper)."""
    x = make(cls, 2, 6)
    flat = Flat()
    value = unwrap_value(x, flat)
    out = Emitter()
    out.reserve("items")
    expression = emit_value(out, value, lambda slot: f"items[{slot}]", "y")
    scope = {**out.namespace, "items": flat.items}
    exec(f"{out.source}\nresult = {expression}", scope)  # noqa: S102 - the text under test
    return out.source, scope["result"], x


@pytest.mark.parametrize("cls", EVERY)
def test_what_is_built_is_what_was_taken_apart(cls):
    _, y, x = built(cls)
    assert metadata(y) == metadata(x)
    assert (y.size(), y.stride(), y.dtype) == (x.size(), x.stride(), x.dtype)
    assert all(a is b for a, b in zip(plain_parts(y), plain_parts(x), strict=True))


@pytest.mark.parametrize("cls", [Pair, Labeled, Nested])
def test_a_declared_class_is_built_without_its_constructor(cls):
    text, _, x = built(cls)
    assert "__tensor_unflatten__" not in text
    assert f"make_wrapper_subclass({cls.__name__}, (2, 6" in text
    assert text.count("make_wrapper_subclass(") == (2 if cls is Nested else 1)
    assert text.count('_dict["') == len(x.__dict__) + (len(x.pair.__dict__) if cls is Nested else 0)


@pytest.mark.parametrize("cls", HAND_WRITTEN)
def test_a_class_by_hand_is_built_by_its_own_method_unless_nothing_is_in_it(cls):
    text, _, _ = built(cls)
    # Tagged keeps its tag in its dictionary; what TwoTensor and Halves hold besides C++'s part is inner tensors.
    assert ("__tensor_unflatten__" in text) == (cls is Tagged or "make_wrapper_subclass" not in text)
    assert not any(word in text for word in (" for ", "isinstance", "getattr", "**"))


STRIDES = [((2, 3), (3, 1)), ((2, 3), (1, 2)), ((1, 3), (7, 1)), ((0, 3), (3, 1)), ((2, 0), (1, 1)), ((), ())]


@pytest.mark.parametrize(("size", "stride"), STRIDES)
def test_sizes_and_strides_of_results(size, stride):
    x = Pair(torch.empty_strided(size, stride), torch.empty_strided(size, stride))
    y = desugar.compile(lambda x: x.detach(), backend="eager")(x)
    assert (y.size(), y.stride()) == (size, stride)
    assert y.is_contiguous() == y.a.is_contiguous()


def test_plain_tensors_and_numbers_are_what_they_are():
    out = Emitter()
    assert emit_value(out, Plain(3), "s{}".format, "y") == "s3"
    assert emit_value(out, Constant(None, 2), "s{}".format, "y") == "s2"
    assert [emit_constant(out, c) for c in (None, True, 7, "it's")] == ["None", "True", "7", '"it\'s"']
    assert out.source.strip() == ""
    name = emit_constant(out, 0.1)
    assert out.namespace[name] == 0.1  # a float is bound, never printed
    assert (emit_int(5, "s{}".format), emit_int(Slot(5), "s{}".format)) == ("5", "s5")
    texts = [emit_ints(extents, "s{}".format) for extents in ((), (4,), (4, Slot(1)))]
    assert [eval(text, {"s1": 7}) for text in texts] == [(), (4,), (4, 7)]


def test_what_needs_another_leaf_is_not_built_here():
    with pytest.raises(TypeError, match="not built from tensors"):
        emit_value(Emitter(), Same("input", 0), str, "y")


@pytest.mark.parametrize("autocast", [False, True])
def test_a_graph_is_called_with_one_list(autocast):
    out = Emitter()
    names = emit_graph_call(out, lambda items: items, "[a]", ["y", "_", "y"], autocast)
    assert names[1] == "_" and len(set(names)) == 3
    assert f"{', '.join(names)}" in out.source and "= compiled_graph([a])" in out.source
    scope = {**out.namespace, "compiled_graph": lambda items: (items, 2, 3), "a": 1}
    exec(out.source, scope)  # noqa: S102 - the text under test
    assert [scope[name] for name in names] == [[1], 2, 3]
    assert ("with DisableAutocast()" in out.source) == autocast


def test_a_graph_without_outputs():
    out = Emitter()
    assert emit_graph_call(out, len, "[]", [], False) == []
    assert out.source.strip() == "compiled_graph([])"


def test_zeros():
    out = Emitter()
    zeros = eval(zeros_expression(out, torch.empty(2, 3, dtype=torch.float64), "(2, 3)"), out.namespace)
    assert zeros.dtype == torch.float64 and zeros.tolist() == [[0.0] * 3] * 2


def test_the_order_of_results_is_the_functions_own():
    compiled = desugar.compile(lambda x: {"b": x * 2, "a": (x, x.sin())}, backend="eager")
    for _ in range(2):
        y = compiled(x := make(Pair, 3))
        assert list(y) == ["b", "a"] and y["a"][0] is x and isinstance(y["a"][1], Tensor)
    assert len(output_nodes(compiled.programs[0].forward)) == 4
