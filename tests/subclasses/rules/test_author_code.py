"""Bytecode of authors' functions: the same steps for each release of Python."""

import pytest

from subclasses.rules.author_code import global_names, steps_of

SCALE = 2.0


class Base:
    def scaled(self, x):
        return x * SCALE


class Child(Base):
    def scaled(self, x):
        return super().scaled(x)

    def named(self, x):
        return super(Child, self).scaled(x)  # noqa: UP008


def two_variables(x, y):
    return max(x, y.first)


def assigned_and_read(x):
    y = x.first
    return y.second


def comprehension(xs):
    return [x.first * SCALE for x in xs]


def maybe_unbound(x):
    if x:
        y = x
    return y.first


def make_closure(scale):
    def closure(x):
        return scale.first * x

    return closure


READS = {  # names of globals, of variables, and of attributes after each kind
    Child.scaled: ["GLOBAL super", "ATTR scaled", "FAST x"],
    Child.named: ["GLOBAL super", "GLOBAL Child", "FAST self", "ATTR scaled", "FAST x"],
    two_variables: ["GLOBAL max", "FAST x", "FAST y", "ATTR first"],
    assigned_and_read: ["FAST x", "ATTR first", "FAST y", "ATTR second"],
    maybe_unbound: ["FAST x", "FAST x", "FAST y", "ATTR first"],
    make_closure(1): ["DEREF scale", "ATTR first", "FAST x"],
}


@pytest.mark.parametrize("function", READS)
def test_what_code_reads(function):
    kinds = {f"LOAD_{kind}": kind for kind in ("GLOBAL", "FAST", "DEREF", "ATTR")}
    read = [f"{kinds[s.opname]} {s.name}" for s in steps_of(function.__code__) if s.opname in kinds]
    assert read == READS[function]


def test_globals_of_a_comprehension_are_those_of_it_or_of_the_function_around_it():
    inside = [c for c in comprehension.__code__.co_consts if hasattr(c, "co_code")]  # none since Python 3.12
    assert [name for code in (comprehension.__code__, *inside) for name in global_names(code)] == ["SCALE"]
