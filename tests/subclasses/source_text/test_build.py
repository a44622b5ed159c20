"""Generated text becomes functions that show their lines."""

import gc
import inspect
import linecache
import traceback
import warnings

import pytest
import torch

from subclasses import TensorSubclass
from subclasses.source_text.build import build_functions
from tests.subclasses.subjects import MODES, Pair, assert_same, make_pair

SOURCE = """\
def first(x):
    return helper(x)


def second(x):
    y = x + 1

    raise ValueError(y)
"""


class Owner:
    pass


def build(owner=None, filename="<subclasses Demo>"):
    return build_functions(SOURCE, {"helper": abs}, filename=filename, owner=owner)


def test_functions_and_their_source():
    namespace = {"helper": abs}
    made = build_functions(SOURCE, namespace, filename="<n>")
    assert namespace == {"helper": abs}
    assert set(made) == {"first", "second"}
    assert made["first"](-3) == 3
    assert made["first"].__source__ == "def first(x):\n    return helper(x)\n"
    assert inspect.getsource(made["second"]) == made["second"].__source__
    with pytest.raises(ValueError) as caught:
        made["second"](1)
    assert "raise ValueError(y)" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(("filename", "start", "end"), [("<a b>", "<a b ", ">"), ("/d/w.py", "/d/w.", ".py")])
def test_file_names_are_unique(filename, start, end):
    names = {build(filename=filename)["first"].__code__.co_filename for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith(start) and name.endswith(end) for name in names)


@pytest.mark.slow
def test_text_leaves_with_its_owner():
    owner = Owner()
    filename = build(owner)["first"].__code__.co_filename
    assert filename in linecache.cache
    linecache.checkcache(filename)
    assert filename in linecache.cache
    del owner
    gc.collect()
    assert filename not in linecache.cache


def loop_with_a_break(x):
    for _ in range(2):
        x = x * 2
        torch._dynamo.graph_break()
    return x.transpose(0, 1).clone()


def error_after_an_op(x):
    x = x * 2
    raise KeyError(x.shape)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, on the break
@pytest.mark.parametrize("mode", ["stock", "inside"])
@pytest.mark.parametrize("fn", [loop_with_a_break, error_after_an_op])
def test_dynamo_compiles_no_generated_frame(fn, mode):
    compiled, x = MODES[mode](fn), make_pair(2, 3)
    if fn is error_after_an_op:
        with pytest.raises(KeyError):
            compiled(x)
    else:
        assert_same(compiled(x), fn(x))


def test_dynamo_meets_the_constructor_itself():
    fn, x = lambda x: TensorSubclass.__new__(Pair, x, x + 1) * 2, torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, on the break
        got = torch.compile(fn, backend="aot_eager")(x)
    assert type(got) is Pair and torch.equal(got.b, (x + 1) * 2)
