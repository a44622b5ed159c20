"""``hasattr`` of a value: compiled code gets the answer that Python gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import desugar
import subclasses
from subclasses import dynamic, inner, static
from tests.subclasses.subjects import declare

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
