"""``adopt`` adds guards, gradients, keys of compiled programs and loading to a class."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.two_tensor import TwoTensor

import desugar
import subclasses
from tests.doors import COMPILED
from tests.subclasses.adoption import by_hand
from tests.subclasses.adoption.by_hand import Settings
from tests.subclasses.adoption.test_flattening import CHANGES, plain
from tests.subclasses.subjects import declare
from tests.tables import raising

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=COMPILED)
def door(request):
    return COMPILED[request.param]


# ---- compiled calls ------------------------------------------------------------------------------------------


def work(x):
    return x * 2 + 1


def facts(x, own):
    if type(x) is Tensor:
        return x.tolist()
    names, context = own(x)
    return type(x), names, plain(context), [getattr(x, name).tolist() for name in names]


def adopted(kind):
    """Returns a function that makes a value of an adopted class, and the class's earlier method."""
    cls, make = getattr(by_hand, kind)()
    own = cls.__tensor_flatten__
    subclasses.adopt(cls)
    return make, own


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", ["tagged", "optional", "with_settings"])
def test_metadata_that_changes_between_calls(kind, door):
    make, own = adopted(kind)
    compiled, x = door(work), make()
    for change in [lambda x: None, *CHANGES[kind][:8]][: -1 if kind == "optional" else None]:
        change(x)
        for _ in range(2):
            assert facts(compiled(x), own) == facts(work(x), own)


# The kind, the function, and the values of its calls, by their arguments.
CALLS = {
    "equal to one": ("tagged", work, [{"flag": flag} for flag in (1, True, 1.0, 1)]),
    "an inner tensor under equal metadata": (
        "optional",
        lambda x: x.raw.sum() if x.scale is None else x.scale.sum(),
        [{"scale": scale} for scale in (None, torch.full((3,), 5.0), None)],
    ),
    "sizes in the metadata": ("with_sizes", work, [{"raw": torch.ones(n, 3)} for n in (2, 3, 4, 5, 1, 0)]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CALLS)
def test_values_that_change_between_calls(case, door):
    kind, function, calls = CALLS[case]
    make, own = adopted(kind)
    compiled = door(function)
    for other in calls:
        assert facts(compiled(make(**other)), own) == facts(function(make(**other)), own)


def test_equal_metadata_is_no_reason_to_compile_again():
    _, make = by_hand.adopted("tagged")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(work, backend=counter)
    for axes in ([0, 1], [1, 0], [0, 1], [1, 0]):
        compiled(make(axes=axes))
    assert counter.frame_count == 2


def test_programs_compiled_before_still_serve_and_still_guard(door):
    cls, make = by_hand.tagged()
    compiled = door(work)
    compiled(make())
    subclasses.adopt(cls)
    for other in ({}, {"axes": [1]}, {}):
        assert compiled(make(**other)).axes == make(**other).axes


def test_results_do_not_share_metadata_that_can_change(door):
    _, make = by_hand.adopted("tagged")
    compiled = door(work)
    compiled(make()).axes.append(7)
    assert compiled(make()).axes == [0, 1]


def test_gradients_are_those_of_eager_mode(door):
    _, make = by_hand.adopted("tagged")
    one, other = make().requires_grad_(), make().requires_grad_()
    y, expected = door(work)(one), work(other)
    y.backward(expected.detach() * 3)
    expected.backward(expected.detach() * 3)
    assert one.grad.raw.tolist() == other.grad.raw.tolist()
    assert (one.grad.axes, one.grad.flag) == (other.grad.axes, other.grad.flag)


def test_it_may_be_an_inner_tensor_of_another(door):
    cls, make = by_hand.tagged()
    with pytest.raises(TypeError, match="unhashable"):
        door(work)(Box(make()))
    subclasses.adopt(cls)
    compiled = door(work)
    for axes in ([0], [1], [0]):
        assert compiled(Box(make(axes=axes))).held.axes == axes


def test_names_have_no_guard_of_their_own():
    cls, make = by_hand.adopted("tagged")
    x, calls, compiled = make(), [], desugar.compile(work, backend="eager")
    compiled(x)
    compiled(x)
    made = cls.__tensor_flatten__
    cls.__tensor_flatten__ = lambda self: calls.append(1) or made(self)
    compiled(x)
    assert len(calls) == 1


# ---- gradients that arrive plain or wrapped ------------------------------------------------------------------


def test_a_gradient_becomes_plain_where_a_plain_one_was_traced():
    Scaled = subclasses.adopt(
        by_hand.written("Scaled", names=("factor",), materialize=lambda self: self.raw * self.factor)
    )
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: x * 5, backend="aot_eager")(x)
    torch.autograd.backward(y, Scaled(torch.ones(3), factor=2.0))
    assert torch.equal(x.grad, torch.full((3,), 10.0))


@pytest.mark.parametrize(
    ("options", "expected"),
    # By default, `dequantize`, which every tensor has, does not count as a conversion.
    [({}, None), ({"to_plain": lambda x: x.raw + 1}, torch.full((2, 3), 2.0))],
)
def test_the_conversion_may_be_given(options, expected):
    _, make = by_hand.adopted("optional", **options)
    found = make().__coerce_same_metadata_as_tangent__(None, Tensor)
    assert found is expected or torch.equal(found, expected)
    assert make().__coerce_same_metadata_as_tangent__({"kind": "b"}) is None


# ---- own hooks stay ------------------------------------------------------------------------------------------


def test_hooks_of_the_class_stay():
    Careful = subclasses.adopt(
        by_hand.written(
            "Careful",
            names=("note",),
            __metadata_guard__=classmethod(lambda cls, saved, now: True),
            _stable_hash_for_caching=lambda self: "mine",
        )
    )
    x = Careful(torch.ones(2), note=["a"])
    assert x._stable_hash_for_caching() == "mine"
    compiled = desugar.compile(work, backend="eager")
    compiled(x)
    assert Careful.__metadata_guard__({}, {"other": 1})
    # That guard accepts any metadata, so it says nothing of the names: they keep a guard.
    x.note.append("b")
    assert compiled(x).raw.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("options", [{}, {"to_plain": Tensor.detach}])
def test_adopting_twice_changes_nothing(options):
    cls, _ = by_hand.adopted("tagged", **options)
    before = dict(vars(cls))
    assert subclasses.adopt(cls) is subclasses.adopt(cls, **options) is cls
    assert dict(vars(cls)) == before


def test_a_class_of_constants_keeps_its_method():
    Two = subclasses.adopt(type("Two", (TwoTensor,), {}))
    assert Two.__tensor_flatten__ is TwoTensor.__tensor_flatten__
    assert not hasattr(Two, "__metadata_guard__")
    assert Two(torch.ones(2), torch.ones(2))._stable_hash_for_caching()


Box = declare(keywords={"fallback": "map"})


test_what_cannot_be_adopted_is_refused = raising(
    [
        (
            lambda given=given, options=options: subclasses.adopt(given(), **options),
            subclasses.SpecError,
            f"(?s){words}",
        )
        for given, options, words in [
            (lambda: Tensor, {}, "Tensor has no __tensor_flatten__ and no __tensor_unflatten__.*declare"),
            (lambda: torch.nn.Module, {}, "expected a class derived from torch.Tensor, got Module"),
            (lambda: torch.ones(2), {}, "expected a class.*got a Tensor"),
            (lambda: torch.masked.MaskedTensor, {}, "MaskedTensor has no __tensor_flatten__"),
            (lambda: Box, {}, "declared with TensorSubclass and has all hooks"),
            (
                lambda: by_hand.tagged()[0],
                {"to_plain": "dequantize"},
                r"to_plain= takes a function.*got 'dequantize'",
            ),
            (
                lambda: by_hand.adopted("tagged", to_plain=Tensor.detach)[0],
                {"to_plain": Tensor.clone},
                r"adopted already, with to_plain=.*adopt it once",
            ),
            (
                lambda: by_hand.adopted("optional")[0],
                {"to_plain": Tensor.clone},
                "adopted already, without to_plain=",
            ),
        ]
    ]
)


# ---- keys of compiled programs -------------------------------------------------------------------------------


def test_keys_follow_metadata_and_class():
    makers = [by_hand.adopted(kind)[1] for kind in ("tagged", "optional", "with_settings")]
    one, other = ([make()._stable_hash_for_caching() for make in makers] for _ in range(2))
    assert one == other and len(set(one)) == 3
    assert makers[2](settings=Settings(4, ["b"]))._stable_hash_for_caching() not in one


def key_of(where, rule):
    """The key of a value of a new class, which has this rule in a table."""

    class Tabled(by_hand.Base):
        rules: ClassVar[dict] = {}

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return (cls.rules.get(cls, {}) or TABLE)[func](*args, **(kwargs or {}))

    subclasses.adopt(Tabled)
    before = Tabled(torch.ones(2))._stable_hash_for_caching()
    table = TABLE if where == "its module" else Tabled.rules.setdefault(Tabled, {})
    table[torch.ops.aten.mul.Tensor] = rule
    after = Tabled(torch.ones(2))._stable_hash_for_caching()
    table.clear()
    assert before != after
    return after


@pytest.mark.parametrize("where", ["the class", "its module"])
def test_keys_follow_rules_in_tables_of_the_class(where):
    first, again, other = (key_of(where, eval(f"lambda x, y: {result}")) for result in "xxy")
    assert first == again != other


TABLE: dict = {}

OTHER = """
import torch
import torch.utils._pytree as pytree
from torch import Tensor

class Other(Tensor):
    @staticmethod
    def __new__(cls, raw):
        self = Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype)
        self.raw = raw
        return self

    def __repr__(self, *, tensor_contents=None):
        return f"Other({self.raw})"

    def __tensor_flatten__(self):
        return ["raw"], None

    @classmethod
    def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
        return cls(inner_tensors["raw"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raw = pytree.tree_map_only(cls, lambda x: x.raw, args)
        out = func(*raw, **(kwargs or {}))
        return pytree.tree_map_only(Tensor, lambda t: cls(CHANGED), out)
"""
CALL = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch._dynamo.utils import counters
from other import Other
if sys.argv[1] == "adopt":
    import subclasses
    subclasses.adopt(Other)
with torch.no_grad():
    y = torch.compile(lambda x: x @ x, backend="inductor")(Other(2 * torch.eye(4)))  # no kernel to build
print(y.raw[0, 0].item(), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["adopt", "as it is"])
def test_a_second_process_runs_the_code_that_the_class_has_now(how, tmp_path):
    (tmp_path / "call.py").write_text(textwrap.dedent(CALL))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }

    def run(result):
        (tmp_path / "other.py").write_text(OTHER.replace("CHANGED", result))
        done = subprocess.run(
            [sys.executable, "-B", "call.py", how],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert run("t") == ["4.0", "0"]
    assert run("t") == ["4.0", "1"]  # the same code: the stored program serves
    # Without `adopt`, PyTorch runs the old code; once it does not, `adopt` is needed no longer for this.
    assert run("t @ t") == (["16.0", "0"] if how == "adopt" else ["4.0", "1"])


# ---- loading -------------------------------------------------------------------------------------------------


class Saved(by_hand.Base):
    names = ("level",)


def test_files_load_once_the_class_is_adopted():
    file = io.BytesIO()
    torch.save({"x": Saved(torch.ones(2), level=[3])}, file)
    file.seek(0)
    with pytest.raises(Exception, match="Saved"):
        torch.load(file, weights_only=True)
    subclasses.adopt(Saved)
    file.seek(0)
    back = torch.load(file, weights_only=True)["x"]
    assert type(back) is Saved
    assert (back.level, back.raw.tolist()) == ([3], [1.0, 1.0])


# ---- classes of others ---------------------------------------------------------------------------------------


ADOPT = """
import json, logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import torch
import subclasses
from subclasses import testing
{made}
before = testing.examine(make, paths={{}}, **options).broken
subclasses.adopt(type(make()))
print(json.dumps([before, testing.examine(make, paths={{}}, **options).broken]))
"""
TWO = """
from torch.testing._internal.two_tensor import TwoTensor
make = lambda: TwoTensor(torch.randn(4, 6), torch.randn(4, 6))
options = {"reference": lambda x: (x.a, x.b)}
"""
FEW = """
from subclasses.testing.runner import PROMISES
options["skip"] = {p.name for p in PROMISES} - {"serialization", "strangers", "round_trip", "views", "values"}
"""
INT8 = """
from torchao.quantization import Int8Tensor, PerRow
make = lambda: Int8Tensor.from_hp(torch.randn(4, 6), PerRow())
options = {}
"""


# In processes of their own, for other tests use these classes as they are.
@pytest.mark.parametrize(
    ("made", "mended"),
    [
        pytest.param(TWO + FEW, {"serialization"}, id="TwoTensor, a few promises"),
        pytest.param(TWO, {"serialization"}, id="TwoTensor", marks=pytest.mark.slow),
        pytest.param(
            INT8,
            {"metadata", "compiled_nesting", "nested_outside"},
            id="torchao",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_classes_of_others_break_fewer_promises(made, mended):
    if made is INT8:
        pytest.importorskip("torchao")
    code = ADOPT.format(made=made)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert before - after == mended and after <= before


def test_torchaos_int8_computes_alike():
    quantization = pytest.importorskip("torchao.quantization")

    Adopted = subclasses.adopt(type("Adopted", (quantization.Int8Tensor,), {}))
    weight, x = torch.randn(8, 16), torch.randn(4, 16)
    for mapping in quantization.MappingType.SYMMETRIC, quantization.MappingType.ASYMMETRIC:
        w = Adopted.from_hp(weight, quantization.PerRow(), mapping)
        expected = torch.nn.functional.linear(x, w)
        for door in COMPILED.values():
            torch.compiler.reset()
            torch.testing.assert_close(door(torch.nn.functional.linear)(x, w), expected)
