"""Targets become functions, modules and calls."""

from pathlib import Path

import pytest
import torch
from torch import nn

from desugar.compare.import_names import TargetError
from desugar.compare.records import Request
from desugar.compare.subject import find_subject
from tests.tables import giving, raising

SUBJECTS = str(Path(__file__).parent / "subjects.py")


def find(name, **options):
    return find_subject(Request(f"{SUBJECTS}:{name}", **options))


@pytest.mark.parametrize("name", ["Net", "net", "make_net"])
def test_a_module_a_class_and_a_function_that_makes_one_are_modules(name):
    subject = find(name)
    assert isinstance(subject.fn, nn.Module)
    assert [args[0].shape[0] for args, _ in subject.make_calls()] == [2, 4, 6]
    assert {"self.linear.weight", "self.norm.running_mean"} <= set(subject.state())


def test_each_call_is_made_anew_and_alike():
    subject = find("Net")
    (first, _), (second, _) = subject.make_calls()[0], subject.make_calls()[0]
    assert torch.equal(first[0], second[0]) and first[0] is not second[0]


test_what_a_function_is = giving(
    {
        # It is not called to find out.
        "one that takes nothing": (lambda: find("nothing").fn.__name__, "nothing"),
        "calls of one that takes nothing": (lambda: find("nothing").make_calls(), [((), {})]),
        "a list of tuples is several calls": (
            lambda: [args[0].numel() for args, _ in find("double", inputs="list_inputs").make_calls()],
            [2, 3],
        ),
        "its state is what it names": (lambda: list(find("with_weight").state()), ["WEIGHT"]),
        "no state": (lambda: list(find("double").state()), []),
    }
)


test_a_wrong_target_says_what_to_do = raising(
    [
        (
            lambda: find("make_nothing").make_calls(),
            TargetError,
            "expected a function or module, got int",
        ),
        (lambda: find("guarded").make_calls(), TargetError, "belongs at the top level of the module"),
    ]
)


COMPILED = """
import torch
from torch import nn
import desugar

def plain(x):
    return x * 2

def inputs():
    return torch.ones(2, 2)

net, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
fast, ours = torch.compile(plain), desugar.compile(plain)
fast_net, our_net = torch.compile(net), desugar.compile(net)
in_place.compile(backend="eager")
"""


@pytest.fixture
def compiled(tmp_path):
    path = tmp_path / "compiled.py"
    path.write_text(COMPILED)
    return lambda name: find_subject(Request(f"{path}:{name}", "inputs")).fn


@pytest.mark.parametrize("name", ["fast", "ours", "fast_net", "our_net"])
def test_what_is_compiled_is_compared_as_it_was_written(compiled, name):
    fn = compiled(name)
    if name.endswith("net"):
        assert type(fn) is nn.Linear and fn._compiled_call_impl is None
    else:
        assert fn.__code__.co_name == "plain" and not hasattr(fn, "__wrapped__")


def test_a_module_that_is_compiled_in_place_is_refused(compiled):
    with pytest.raises(TargetError, match=r"in_place\.compile\(\) was called in the file; leave that out"):
        compiled("in_place")
