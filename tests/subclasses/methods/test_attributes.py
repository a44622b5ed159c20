"""``hasattr`` of a value in compiled code; attributes that are not fields are kept as on any tensor."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import desugar
import subclasses
from subclasses import dynamic, inner, static
from tests.subclasses.subjects import MODES, declare

PATHS = {
    "stock": lambda fn: torch.compile(fn, backend="eager", fullgraph=True),
    "desugar": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True),
}


class Found:
    """A descriptor whose answer depends on the value."""

    def __get__(self, x, owner=None):
        if x is not None and x.n == 0:
            raise AttributeError("found")
        return 1


def refuse(self):
    raise AttributeError("refused")


Held = declare(
    keywords={"fallback": "map"},
    a=inner(),
    d=inner(differentiable=True),
    o=inner(optional=True),
    n=static(default=0),
    k=dynamic(default=2),
    table=subclasses.constant([1.0]),
    number=5,
    found=Found(),
    method=lambda self: self.a * 2,
    of=classmethod(lambda cls, a: cls(a, a, None)),
    helper=staticmethod(lambda: 2),
    refused=property(refuse),
)
NAMES = """a d o n k table number found method of helper refused materialize unwrap implements missing shape sin
add_""".split()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("of", ["argument", "intermediate", "parameter"])
def test_hasattr_is_that_of_python(path, of):
    def ask(x):
        x = x + 1 if of == "intermediate" else x
        return [hasattr(x, name) for name in NAMES], x.unwrap("a") * 1

    x = Held.of(torch.ones(2))
    x = nn.Parameter(x, requires_grad=False) if of == "parameter" else x
    expected = ask(x)[0]
    assert PATHS[path](ask)(x)[0] == expected
    assert {name for name, has in zip(NAMES, expected, strict=True) if not has} == {
        *("found", "refused", "materialize", "missing")
    }


@pytest.mark.parametrize("path", PATHS)
def test_hasattr_is_asked_again_for_another_class_and_another_value(path):
    Other = declare(Held, only_here=lambda self: self.a)
    scaled = lambda x: x.unwrap("a") * (2 if hasattr(x, "only_here") else 3 if hasattr(x, "found") else 5)  # noqa: E731
    compiled = PATHS[path](scaled)
    ones = torch.ones(2)
    for x in (Held.of(ones), Other.of(ones), Held(ones, ones, None, n=1), Held.of(ones)):
        torch.testing.assert_close(compiled(x), scaled(x))


aten = torch.ops.aten


# ---- attributes that are not fields ------------------------------------------------------------------------

Marked = declare(name="Marked", __module__=__name__, count=0, keywords={"fallback": "map"})


def fresh(**body):
    """A class of its own, which materializes."""
    return declare(
        name="Box",
        held=inner(),
        known=static(default=0),
        width=1,
        keywords={"fallback": "materialize"},
        materialize=lambda self: self.held * getattr(self, "offset", 1),
        **body,
    )


@pytest.mark.parametrize("name", ["note", "is_hf_initialized", "_no_weight_decay", "main_grad"])
def test_marks_are_kept_without_a_word(name):
    x = Marked(torch.ones(2))
    with warnings.catch_warnings(action="error"):
        setattr(x, name, True)
        parameter = nn.Parameter(Marked(torch.ones(2)))
        setattr(parameter, name, True)
        parameter.grad = Marked(torch.ones(2))
    for y in (x, parameter, copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert getattr(y, name) is True
    assert not getattr(x * 2, name, False)


def read_and_mark(x):
    y = x * x.note
    y.note = 3
    return y


@pytest.mark.parametrize("mode", ["stock", "desugar"])
def test_a_compiled_function_sees_what_it_reads_itself(mode):
    x = Marked(torch.ones(2))
    compiled = MODES[mode](read_and_mark)
    for note in (5, 7):
        x.note = note
        out = compiled(x)
        assert (out.held.tolist(), out.note) == ([note, note], 3)


def test_an_attribute_that_hides_a_constant_of_the_class_warns():
    """In compiled code, rules and methods read the constant: eager mode and a compiled function differ."""
    Box = fresh(offset=1)
    x = Box(torch.ones(2))
    with pytest.warns(
        UserWarning, match=r"Box\.offset is a constant.*`offset = static\(default=1\)`"
    ) as seen:
        x.offset = 5
    assert seen[0].filename == __file__
    assert (x + 0).tolist() == [5, 5]
    for door in ("stock", "desugar", "inside"):
        assert MODES[door](lambda x: x + 0)(x).tolist() == [1, 1]


def test_fields_and_attributes_of_tensor_are_no_matter():
    Box = fresh()
    Box.implements(aten.cos.default)(lambda func, x: x.held * x.known if x.grad is None else x)
    x = Box(torch.ones(2))
    with warnings.catch_warnings(action="error"):
        x.grad = None
        x.requires_grad = True
        x.held = torch.zeros(2)
    with pytest.raises(AttributeError, match=r"Box\.known is metadata and constant"):
        x.known = 3
