"""A rule or method that assigns a field of an argument: the argument has the new inner tensor after every compiler."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

from subclasses import DispatchError, export, inner
from tests.doors import COMPILED
from tests.modules import Held
from tests.subclasses.subjects import declare
from tests.tables import raising

WAYS = {"stock eager": lambda fn: torch.compile(fn, backend="eager"), **COMPILED}


def count_(self):
    self.n = self.n + 1
    return self


def add_(func, x, y, alpha=1):
    x.a = x.a + alpha * y
    return count_(x)


Counted = declare(
    keywords={"fallback": "map"}, a=inner(), n=inner(), count_=count_, rules={Tensor.add_: add_}
)


def count_inside_(self):
    self.c.n = self.c.n + 1
    return self


def replace_inside_(self):
    self.c = Counted(self.c.a, self.c.n + 1)
    return self


Nested = declare(
    keywords={"fallback": "map"}, c=inner(), b=inner(), count_=count_inside_, replace_=replace_inside_
)


class Holder(Held):
    def forward(self, y):
        self.x.count_()
        return self.x * y * self.x.n.sum()


def counted():
    return Counted(torch.ones(2), torch.zeros(2))


def nested():
    return Nested(counted(), torch.ones(2))


def parts(x):
    return [parts(getattr(x, n)) for n in x.__spec__.inner_names] if hasattr(x, "__spec__") else x.tolist()


def without_grad(x):
    with torch.no_grad():
        x.count_()
    return x * 2


def both(x):
    y = x * 2
    y.count_()
    x.count_()
    return y + x


def read_after(x):
    x.count_()
    y = x.n * 2
    x.count_()
    return Counted(y + x.n, x.a)


def read_before_and_after(x):
    y = x.n * 3
    x.count_()
    return Counted(y + x.n, x.a)


def read_by_another_name(x):
    z = x
    x.add_(1)
    return Counted(z.a.exp(), z.n)


CASES = {
    "read after": (counted, read_after),
    "read before and after": (counted, read_before_and_after),
    "read by another name": (counted, read_by_another_name),
    "method": (counted, lambda x: x.count_() * 1),
    "rule": (counted, lambda x: x.add_(2, alpha=3) * 1),
    "operator": (counted, lambda x: x.__iadd__(2) * 1),
    "after a use": (counted, both),
    "a leaf": (lambda: counted().requires_grad_(), lambda x: x.count_() * 1),
    "a leaf without grad": (lambda: counted().requires_grad_(), without_grad),
    "inside of a value": (nested, lambda x: x.count_() * 1),
    "a whole inner value": (nested, lambda x: x.replace_() * 1),
}


def assert_same(compiled, fn, got, want, calls):
    """Compares the results, and the argument after each call."""
    for _ in range(calls):
        assert parts(compiled(got)) == parts(fn(want))
        assert parts(got) == parts(want)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_the_argument_has_it(case, way):
    make, fn = CASES[case]
    assert_same(WAYS[way](fn), fn, make(), make(), 3)


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_has_it(way):
    got, want = (Holder({"x": counted()}) for _ in range(2))
    compiled = WAYS[way](got)
    for _ in range(3):
        assert parts(compiled(torch.ones(2))) == parts(want(torch.ones(2)))
        assert parts(got.x) == parts(want.x)


def in_one_graph(case, backend):
    make, fn = CASES[case]
    return torch.compile(fn, backend=backend, fullgraph=True)(make())


def exported(case, strict):
    """The program would compute with the old inner tensor, too."""
    make, fn = CASES[case]
    return torch.export.export(Module(fn), (make(),), strict=strict)


test_one_whole_graph_is_refused = raising(
    {
        f"{case}, {call.__name__} {option}": (
            lambda case=case, call=call, option=option: call(case, option),
            errors,
            r"copy_\(\.\.\.\)",
        )
        for case in ("method", "rule")
        for call, options, errors in (
            (in_one_graph, ("eager", "aot_eager"), Unsupported),
            (exported, (False, True), (DispatchError, Unsupported)),
        )
        for option in options
    }
)


@pytest.mark.parametrize("case", ["method", "rule", "after a use", "read after", "read by another name"])
def test_one_whole_graph_by_desugar(case):
    make, fn = CASES[case]
    assert_same(WAYS["desugar"](fn, fullgraph=True), fn, make(), make(), 2)


def of_the_graph(x):
    """Nothing outside of the graph holds the value, and ops after the assignment see it."""
    y = x * 2
    y.add_(1)
    return y.count_() * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_value_of_the_graph_ends_none(backend):
    compiled = torch.compile(of_the_graph, backend=backend, fullgraph=True)
    assert parts(compiled(counted())) == parts(of_the_graph(counted()))


# ---- torch.export ----------------------------------------------------------------------------------------------


class Module(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        y = self.fn(x)
        return y.a + y.n


@pytest.mark.parametrize("case", ["method", "rule"])
def test_export_of_a_flattened_argument(case):
    make, fn = CASES[case]
    program = torch.export.export(export.Flattened(Module(fn)), export.flatten((make(),))).module()
    torch.testing.assert_close(program(*export.flatten((make(),))), Module(fn)(make()))


def write_count(self):
    self.n.copy_(self.n + 1)
    return self


def test_the_advice_works():
    """The error advises to write into the inner tensor, and the program has this write."""
    written = declare(Counted, count_=write_count)
    got, want, traced = (written(torch.ones(2), torch.zeros(2)) for _ in range(3))
    program = torch.export.export(Module(write_count), (traced,)).module()
    for _ in range(2):
        torch.testing.assert_close(program(got), Module(write_count)(want))
        assert parts(got) == parts(want)
