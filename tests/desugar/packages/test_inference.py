"""Packages of inference return the same results as eager mode, for arguments of many kinds."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import desugar
from desugar import PackageError, SignatureError, call
from desugar.packages.saving.capture import Call
from subclasses import TensorSubclass, inner, static
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.classes import TwoTensor
from tests.desugar.judge import aliasing, assert_same_values, identities, leaves_of
from tests.modules import Held
from tests.subclasses.subjects import declare


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, 16), nn.LayerNorm(16), nn.Linear(16, width)

    def forward(self, x, scale=1.0, *, offset: Tensor | None = None):
        y = self.second(torch.relu(self.norm(self.first(x)))) * scale
        return y if offset is None else y + offset


class Scaled(TensorSubclass, fallback="materialize"):
    raw: Tensor = inner()
    factor: float = static(default=2.0)

    def materialize(self):
        return self.raw * self.factor


def rows(*lengths: int, width: int = 8, cls: type = JaggedTensor) -> Tensor:
    return cls.from_tensors([torch.randn(n, width) for n in lengths])


def int8_block() -> Block:
    model = Block(32)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def check(package, fn, *args, **kwargs):
    """Compares a call of a package with eager mode: structure, leaves, and which of them share memory."""
    with torch.no_grad():
        got, want = package(*args, **kwargs), fn(*args, **kwargs)
    assert _pytree.tree_structure(got) == _pytree.tree_structure(want)
    assert_same_values(leaves_of(got), leaves_of(want))
    given, (got, want) = leaves_of((args, kwargs)), map(leaves_of, (got, want))
    assert identities([*given, *got]) == identities([*given, *want])
    assert aliasing([*given, *got]) == aliasing([*given, *want])


# ---------------------------------------------------------------------------------------------- calls of packages


@dataclass
class Case:
    """A function, the calls for which it is saved, and calls of its package.

    Attributes:
        taken: Each of these calls returns the values of eager mode.
        refused: By a part of the error, a call that raises `SignatureError`.
        options: For `pack`.
    """

    fn: Callable[..., Any]
    saved: Sequence[Call]
    taken: Sequence[Call]
    refused: Mapping[str, Call] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


DYNAMIC = {"dynamic": True}


def structured(batch, flags, /, *rest, mode="sum", **more):
    x, (y, z) = batch["x"], batch["yz"]
    total = x + y * z + sum(rest) + more["bias"]
    return {"total": total, "parts": [x * 2, (y, None)], "mode": mode, "n": 3, "flags": flags}


def structures(batch=lambda x, *yz: {"x": x, "yz": yz}, flag=True, **more):
    x, y, z, r, b = (torch.randn(3) for _ in range(5))
    return call(batch(x, y, z), [flag, 2], r, bias=b, **more)


def two_views(r):
    y = r.values * 2
    return y, y[:, 1:]


def conditional(x):
    return x.view(-1, 2).sum(1) if x.shape[0] > 4 else x * 2


def of_one_row(x):
    return (
        x @ x.t(),
        x[:1].expand(7, -1) * 2,
        x[-1:] * 2,
        x[0] * 3,
        x.sum(0),
        x.mean(0),
        x[:2] - x[:1],
        x.t().clone(),
    )


def with_int(x, n):
    return x * n, n + x.shape[0], x.shape


def made_inside(x, offsets):
    made = JaggedTensor(x * 2, offsets, max_length=5)
    return made, made.sum(1), Scaled(x, factor=3.0)


@torch.no_grad()
def decorated(x):
    return x * 2


def of(*size):
    """Returns a call with one random tensor."""
    return call(torch.randn(size))


def of_two(first, second):
    return call(torch.randn(first), torch.randn(second))


def of_one_twice(size):
    x = torch.randn(size)
    return call(x, x)


CASES = {
    "a module": lambda: Case(Block(), [of(4, 8)], [of(4, 8), call(x=torch.randn(4, 8))]),
    "defaults and keywords": lambda: Case(
        Block(),
        [call(torch.randn(4, 8), 3.0), call(torch.randn(4, 8), offset=torch.randn(8))],
        [
            call(torch.randn(4, 8), 3.0),
            call(torch.randn(4, 8), scale=3.0),
            call(torch.randn(4, 8), offset=torch.randn(8)),
            call(torch.randn(4, 8), 1.0, offset=torch.randn(8)),  # the default, given
        ],
        {"scale": call(torch.randn(4, 8), 2.0)},
    ),
    "structures": lambda: Case(
        structured,
        [structures()],
        [structures()],
        {
            r"batch: expected the keys \['x', 'yz'\]": structures(lambda x, *yz: {"yz": yz, "x": x}),
            r"batch\['yz'\]: expected a tuple, got a list": structures(lambda x, *yz: {"x": x, "yz": [*yz]}),
            "mode": structures(mode="mean"),
            r"flags\[0\]: expected True": structures(flag=1),
        },
    ),
    "names of functions": lambda: Case(
        lambda type, len, isinstance=None: type + len, [of_two(3, 3)], [of_two(3, 3)]
    ),
    "one object twice, and two objects": lambda: Case(
        lambda x, y: x * 2 + y,
        [of_one_twice(3), of_two(3, 3)],
        [of_one_twice(3), of_two(3, 3)],
    ),
    "one object twice": lambda: Case(
        lambda x, y: x * 2 + y,
        [of_one_twice(3)],
        [of_one_twice(3)],
        {"y: expected the same object as x": of_two(3, 3)},
    ),
    "two objects": lambda: Case(
        lambda x, y: x * 2 if x is y else x * 3,
        [of_two(2, 2)],
        [of_two(2, 2)],
        {"y: expected another object than x": of_one_twice(2)},
    ),
    "results that are no new tensors": lambda: Case(
        lambda x, y: (x, x.detach(), y[1:], y.view(2, 3), (x * 2).view(-1)),
        [of_two((2, 3), 6)],
        [of_two((2, 3), 6)],
    ),
    "a view of another result": lambda: Case(two_views, [call(rows(3, 1))], [call(rows(2, 0, 5))]),
    "an argument that is not used": lambda: Case(
        lambda x, y: x + 1,
        [of_two(2, 3)],
        [of_two(2, (5, 5))],
        {"y: expected a tensor": call(torch.ones(2), None)},
    ),
    "equal sizes that need not be equal": lambda: Case(
        lambda x, y: x.sum(0) + y.sum(0),
        [of_two((4, 3), (4, 3))],
        [of_two((2, 5), (9, 5))],
        {r"y.size\(1\): expected x.size\(1\) = 3, got 4": of_two((2, 3), (2, 4))},
        DYNAMIC,
    ),
    "conditions on sizes": lambda: Case(
        conditional, [of(6), of(2)], [of(6), of(10), of(2), of(3)], {}, DYNAMIC
    ),
    "a size on one side of a condition": lambda: Case(
        conditional, [of(6)], [of(10)], {r"x.size\(0\)": of(3)}, DYNAMIC
    ),
    "an odd size": lambda: Case(conditional, [of(6)], [of(10)], {r"x.size\(0\)": of(7)}, DYNAMIC),
    "ints that vary": lambda: Case(
        with_int,
        [call(torch.randn(3), 5)],
        [call(torch.randn(n + 4), n) for n in (5, 0, 1)],
        {
            "n: expected at least 0, got -4": call(torch.randn(3), -4),
            "n: expected an int, got True": call(torch.randn(3), True),
        },
        DYNAMIC,
    ),
    "sizes that are computed": lambda: Case(
        lambda x: (x * 2, x.numel(), x.shape[0] * 2 + 1, {"size": x.mT.shape}),
        [of(4, 3)],
        [of(4, 3), of(7, 5)],
        {},
        DYNAMIC,
    ),
    "an int that is constant": lambda: Case(
        with_int,
        [call(torch.randn(3), 5)],
        [call(torch.randn(3), 5)],
        {"n: expected 5": call(torch.randn(3), 6)},
    ),
    "strides": lambda: Case(
        lambda x: x * 2,
        [of(4, 3)],
        [
            of(6, 3),
            call(torch.randn(2, 3)[:1]),
            call(torch.randn(8, 3)[::8]),
        ],  # the stride of one row is none
        {r"x.stride\(": call(torch.randn(3, 6).t())},
        DYNAMIC,
    ),
    "sizes of 1": lambda: Case(
        of_one_row,
        [of(5, 3)],
        [of(5, 3), of(1, 3), of(2, 7), of(4, 1), of(1, 1)],
        {r"x.size\(0\): expected at least 1 \(save a call": of(0, 3)},
        DYNAMIC,
    ),
    "saved with sizes of 1": lambda: Case(
        of_one_row,
        [of(1, 3)],
        [of(1, 3), of(1, 7)],
        {r"x.size\(0\): expected 1, got 5": of(5, 3), r"x.size\(0\): expected 1, got 0": of(0, 3)},
        DYNAMIC,
    ),
    "saved with sizes of 0": lambda: Case(
        lambda x: (x.sum(0), x.mean(0), x * 2),
        [of(0, 3)],
        [of(0, 3), of(0, 7)],
        {r"x.size\(0\): expected 0, got 5": of(5, 3), r"x.size\(0\): expected 0, got 1": of(1, 3)},
        DYNAMIC,
    ),
    "squeeze": lambda: Case(
        lambda x: (x.squeeze(0) * 2, torch.squeeze(x[1:], dim=-1)),
        [of(5, 3)],
        [of(5, 3), of(2, 3)],
        {
            r"x.size\(0\) != 1.*got x.size\(0\) = 1": of(1, 3),
            r"x.size\(1\) != 1.*got x.size\(1\) = 1": of(5, 1),
        },
        DYNAMIC,
    ),
    "squeeze of all": lambda: Case(
        lambda x: x.squeeze(), [of(5, 3)], [of(2, 3)], {"!= 1": of(5, 1)}, DYNAMIC
    ),
    "jagged rows": lambda: Case(
        Block(),
        [call(rows(3, 5, 2))],
        [call(rows(*n)) for n in ((3, 5, 2), (1, 0, 5), (7,), (0, 2), (1, 1), (0, 0, 9, 1))],
        {
            "x: expected a JaggedTensor, got one of torch.float32": of(3, 5, 8),
            "float64": call(rows(3, 5).double()),
            "expected 8, got 9": call(rows(3, 5, 2, width=9)),
        },
    ),
    "padded rows": lambda: Case(
        Block(),
        [call(rows(3, 5, 2, cls=PaddedTensor))],
        [call(rows(*n, cls=PaddedTensor)) for n in ((3, 5, 2), (1, 0, 5))],
        {
            "x: expected a PaddedTensor, got one of torch.float32": of(3, 5, 8),
            "float64": call(rows(3, 5, cls=PaddedTensor).double()),
            "expected 8, got 9": call(rows(3, 5, 2, width=9, cls=PaddedTensor)),
        },
    ),
    "an int of a wrapper": lambda: Case(
        lambda x: x.values * x.max_length,
        [call(rows(2, 3))],
        [call(rows(3, 1, 2))],
        {r"x.max_length: expected 3, got 7": call(rows(7, 1))},
    ),
    "int8 weights": lambda: Case(int8_block(), [of(4, 32)], [of(7, 32)], {}, DYNAMIC),
    "wrappers that are made inside": lambda: Case(
        made_inside,
        [call(torch.randn(6, 2), torch.tensor([0, 1, 6]))],
        [call(torch.randn(6, 2), torch.tensor([0, 1, 6]))],
        {},
        {"classes": [Scaled]},
    ),
    "a class of the user's own": lambda: Case(
        lambda x: (x + 1, x.raw * 2),
        [call(Scaled(torch.randn(3)))],
        [call(Scaled(torch.randn(3)))],
        {
            r"x: expected Scaled\(factor=2.0\), got Scaled\(factor=3.0\)": call(
                Scaled(torch.randn(3), factor=3.0)
            )
        },
        {"classes": [Scaled]},
    ),
    "minus zero": lambda: Case(
        lambda x, s: x / torch.full_like(x, s),
        [call(torch.ones(1), 0.0)],
        [call(torch.ones(1), 0.0)],
        {r"s: expected 0.0, .* got -0.0": call(torch.ones(1), -0.0)},
    ),
    "NaN": lambda: Case(lambda x, s=float("nan"): x * s, [of(3)], [of(3)]),
    "a decorator": lambda: Case(decorated, [of(3)], [of(3)]),
    "a function of torch": lambda: Case(nn.functional.relu, [of(3)], [of(3)]),
    "keywords in another order": lambda: Case(
        lambda x, **more: x * more["a"] + more["b"],
        [call(torch.ones(1), a=1, b=2)],
        [call(torch.ones(1), b=2, a=1)],
        {"more: expected the keys": call(torch.ones(1), a=1)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls(pack, name):
    case = CASES[name]()
    package = pack(case.fn, *case.saved, **case.options)
    for one in case.taken:
        check(package, case.fn, *one.args, **one.kwargs)
    for words, one in case.refused.items():
        with pytest.raises(SignatureError, match=words):
            package(*one.args, **one.kwargs)


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:var_mean")  # of no rows
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_dynamic_sizes(pack, size):
    model = Block()
    saved = [of(4, 8), *([of(size, 8)] if size == 0 else [])]  # a program for another size takes no 0
    check(pack(model, *saved, dynamic=True), model, torch.randn(size, 8))


def test_a_static_batch_of_another_size(pack):
    """A program for batch 4 refuses batch 5, for which PyTorch's own export returned garbage."""
    package = pack(Block(), of(4, 8))
    with pytest.raises(SignatureError, match=r"x.size\(0\): expected 4, got 5") as caught:
        package(torch.randn(5, 8))
    assert (caught.value.argument, caught.value.expected, caught.value.got) == ("x.size(0)", "4", "5")
    with pytest.raises(TypeError, match="offsett"):
        package(torch.randn(4, 8), offsett=torch.randn(8))


def convolved(x):
    """Each row shorter by one entry: as many entries in all as only the data tells."""
    return torch.nn.functional.conv1d(x.mT, torch.ones(8, 8, 2)).mT


@pytest.mark.slow
@pytest.mark.parametrize("native", [None, True, False])  # None: saved without machine code
def test_a_size_that_data_determines(pack, native):
    fn, given = lambda x: convolved(x).values.mean(), call(rows(3, 5, 2))
    if native is None:
        package = pack(fn, given)
    else:
        desugar.save(pack.path, fn, given)
        package = desugar.load(pack.path, classes=(JaggedTensor,), native=native)
    for lengths in [(3, 5, 2), (4, 2), (2, 7, 3, 2)]:
        check(package, fn, rows(*lengths))


# ----------------------------------------------------------------------------------------------------- classes


def changed_class():
    """Returns a class of the name of `Scaled` that is declared in another way."""
    return declare(Scaled, name="Scaled", __module__=__name__, more=static(default=0))


@pytest.mark.parametrize(
    ("classes", "said"),
    [(list, r"pass classes=\[Scaled\]"), (lambda: [changed_class()], "is declared differently")],
)
def test_a_class_is_given_at_loading(pack, classes, said):
    desugar.save(pack.path, lambda x: x + 1, call(Scaled(torch.randn(3))), native=False)
    with pytest.raises(PackageError, match=said):
        desugar.load(pack.path, classes=classes(), native=False)


class Box:
    def __init__(self, value):
        self.value = value


def test_a_registered_container_is_given_at_loading(pack):
    _pytree.register_pytree_node(Box, lambda box: ([box.value], None), lambda parts, _: Box(*parts))
    try:
        desugar.save(pack.path, lambda box: Box(box.value * 2), call(Box(torch.ones(2))), native=False)
        with pytest.raises(PackageError, match=r"pass classes=\[Box\]"):
            desugar.load(pack.path, native=False)
        package = desugar.load(pack.path, classes=[Box], native=False)
        assert package(Box(torch.ones(2))).value.tolist() == [2, 2]
        with pytest.raises(SignatureError, match="box: expected a Box"):
            package(torch.ones(2))
    finally:
        del _pytree.SUPPORTED_NODES[Box]


# ---------------------------------------------------------------------------------------------------- refusals


seen: list[Tensor] = []


def appends(x):
    seen.append(x * 2)
    return x + 1


class Assigns(nn.Module):
    def forward(self, x):
        self.last = x
        return x + 1


class Views(Held):
    def forward(self, x):
        return x + self.whole.sum() + self.part.sum()


def reads_more(more):
    """Returns a function that reads an attribute of its argument, and a call."""
    x = torch.ones(2)
    x.more = more
    return lambda x: x + x.more, call(x)


def with_its_values(x):
    return call(x, x.values)


def given_its_weight():
    """Returns a function that holds a tensor, and a call with that tensor."""
    weight = torch.ones(3)
    return lambda x: x * 10 + weight, call(weight)


GLOBAL = torch.ones(3)
GLOBALS = [GLOBAL]
GLOBAL_ROWS = rows(2, 3)


SIDE_EFFECTS, ATTRIBUTE = "changes objects besides tensors", r"x\.more|\.more of an argument"
save = functools.partial(desugar.save, native=False)
NOT_SAVED = {
    "a list that grows": (PackageError, SIDE_EFFECTS, lambda path: save(path, appends, of(2))),
    "an attribute of a module": (PackageError, SIDE_EFFECTS, lambda path: save(path, Assigns(), of(2))),
    "no tensors": (
        PackageError,
        "computes nothing with tensors",
        lambda path: save(path, lambda x: 3, of(2)),
    ),
    "an object": (
        PackageError,
        "x: expected tensors, numbers, text",
        lambda path: save(path, lambda x: x, call(object())),
    ),
    "an int of an argument": (PackageError, ATTRIBUTE, lambda path: save(path, *reads_more(1))),
    "a tensor of an argument": (PackageError, ATTRIBUTE, lambda path: save(path, *reads_more(torch.ones(2)))),
    "a weight as an argument": (
        PackageError,
        "x is the same object",
        lambda path: save(path, *given_its_weight()),
    ),
    "an inner tensor twice": (
        PackageError,
        "v is the same object as another part",
        lambda path: save(path, lambda x, v: x.values * 10 + v, with_its_values(rows(2, 3))),
    ),
    "a global as an argument": (
        PackageError,
        "x is the same object as .* that the function holds",
        lambda path: save(path, lambda x: x * 10 + GLOBAL, call(GLOBAL)),
    ),
    "rows as a global and an argument": (
        PackageError,
        "x is the same object",
        lambda path: save(path, lambda x: x * 10 + GLOBAL_ROWS, call(GLOBAL_ROWS)),
    ),
    "a list as a global and an argument": (
        PackageError,
        "x is the same object",
        lambda path: save(path, lambda x: x[0] * 10 + GLOBALS[0], call(GLOBALS)),
    ),
    "a default as an argument": (
        PackageError,
        "x is the same object",
        lambda path: save(path, lambda x, weight=GLOBAL: x * 10 + weight, call(GLOBAL)),
    ),
    "a global as an inner tensor": (
        PackageError,
        r"x\.a is the same object",
        lambda path: save(path, lambda x: x.a * 10 + GLOBAL, call(TwoTensor(GLOBAL, torch.ones(3)))),
    ),
    "an inner tensor of two arguments": (
        PackageError,
        r"x\.a is the same object",
        lambda path: save(
            path,
            lambda x, y: x * 10 + y.a,
            call(TwoTensor(GLOBAL, torch.ones(3)), TwoTensor(GLOBAL, torch.zeros(3))),
        ),
    ),
    "random numbers": (
        PackageError,
        "draws random numbers in Python",
        lambda path: save(path, lambda x: x + random.randint(0, 10**6), of(1)),
    ),
    "a number that is computed": (
        PackageError,
        "holds a number that is computed",
        lambda path: save(path, lambda x, n: (x * 2, n / 2), call(torch.ones(3), 5), dynamic=True),
    ),
    "weights that share memory": (
        PackageError,
        "share memory, and would be two in a file",
        lambda path: save(path, Views({"whole": GLOBAL, "part": GLOBAL[:2]}), of(2)),
    ),
    "a weight on the meta device": (
        PackageError,
        "a weight is on the meta device",
        lambda path: save(path, nn.Linear(2, 2, device="meta"), call(torch.randn(1, 2, device="meta"))),
    ),
    "rows of lengths that data determines": (
        PackageError,
        "a size depends on data",
        lambda path: save(path, convolved, call(rows(3, 5, 2))),
    ),
    "a branch on data": (
        torch._dynamo.exc.Unsupported,
        None,
        lambda path: save(path, lambda x: x + 1 if x.sum() > 0 else x, of(2)),
    ),
    "autocast": (
        PackageError,
        r"outside of torch\.autocast",
        lambda path: torch.autocast("cpu")(save)(path, decorated, of(2)),
    ),
    "no call": (TypeError, r"desugar.call\(x, y\)", lambda path: save(path, decorated)),
    "a tensor": (TypeError, r"expected desugar\.call", lambda path: save(path, decorated, torch.ones(2))),
    "a builtin": (TypeError, "wrap it in a function", lambda path: save(path, torch.add, of_two(3, 3))),
    "another suffix": (
        ValueError,
        r"ends in \.pt2",
        lambda path: save(path.parent / "a.zip", decorated, of(2)),
    ),
    "no folder": (FileNotFoundError, "no folder", lambda path: save(path / "b.pt2", decorated, of(2))),
}


@pytest.mark.parametrize("name", NOT_SAVED)
def test_what_cannot_be_saved(tmp_path, name):
    error, said, saved = NOT_SAVED[name]
    with pytest.raises(error, match=said):
        saved(tmp_path / "package.pt2")
    assert not seen and list(tmp_path.iterdir()) == []


def requires_grad(x):
    return x.clone().requires_grad_()


MODES = {
    "autocast": (
        "autocast: expected a call outside",
        lambda package, x: torch.autocast("cpu")(package.__call__)(x),
    ),
    "gradients": (
        "x: expected a tensor that does not require grad",
        lambda package, x: package(requires_grad(x)),
    ),
    "vmap": ("x: expected a plain tensor", lambda package, x: torch.vmap(package)(torch.stack([x, x]))),
    "no_grad": (
        r"pass its detach\(\)",
        lambda package, x: torch.no_grad()(package.__call__)(requires_grad(x)),
    ),
    "inference": (
        r"pass its detach\(\)",
        lambda package, x: torch.inference_mode()(package.__call__)(requires_grad(x)),
    ),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_that_a_program_does_not_know(pack, name):
    said, run = MODES[name]
    package, x = pack(lambda x: x @ x, of(3, 3)), torch.randn(3, 3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check(package, lambda x: x @ x, x)
    with pytest.raises(SignatureError, match=said):
        run(package, x)


def test_memory_that_is_shared_with_a_written_argument(pack):
    def fn(x, y):
        x.add_(1)
        return x * y

    package = pack(fn, of_two(3, 3))
    mine, other = torch.randn(3), torch.randn(3)
    expected = mine.clone()
    assert torch.equal(package(mine, other), fn(expected, other)) and torch.equal(mine, expected)
    whole = torch.randn(4)
    before = whole.clone()
    with pytest.raises(SignatureError, match="pass clones"):
        package(whole[:3], whole[1:])
    assert torch.equal(whole, before)


def test_a_package_is_not_copied(pack):
    with pytest.raises(TypeError, match="load its file again"):
        copy.deepcopy(pack(lambda x: x * 2, of(3)))
