"""Packages of inference: what they take and return, with eager mode as the judge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import desugar
from desugar import PackageError, SignatureError
from subclasses import TensorSubclass, inner, static
from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.desugar.judge import assert_same_values, leaves_of


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


def assert_same(got, want):
    """Compares results: their structure, and each leaf."""
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(want)
    assert_same_values(leaves_of(got), leaves_of(want))


def check(package, fn, *args, **kwargs):
    """Compares a call of a package with eager mode."""
    with torch.no_grad():
        assert_same(package(*args, **kwargs), fn(*args, **kwargs))


# ------------------------------------------------------------------------------------------------- structure


def test_a_module(pack):
    model = Block()
    package = pack(model, desugar.call(torch.randn(4, 8)))
    check(package, model, torch.randn(4, 8))
    check(package, model, x=torch.randn(4, 8))
    assert sorted(package.state) == sorted(dict(model.named_parameters()))


def test_defaults_and_keywords(pack):
    model = Block()
    calls = desugar.call(torch.randn(4, 8), 3.0), desugar.call(torch.randn(4, 8), offset=torch.randn(8))
    package = pack(model, *calls)
    check(package, model, torch.randn(4, 8), 3.0)
    check(package, model, torch.randn(4, 8), scale=3.0)
    check(package, model, torch.randn(4, 8), offset=torch.randn(8))
    check(package, model, torch.randn(4, 8), 1.0, offset=torch.randn(8))  # the default, given
    with pytest.raises(SignatureError, match="scale"):
        package(torch.randn(4, 8), 2.0)
    with pytest.raises(TypeError, match="offsett"):
        package(torch.randn(4, 8), offsett=torch.randn(8))


def test_structures_of_arguments_and_results(pack):
    def fn(batch, flags, /, *rest, mode="sum", **more):
        x, (y, z) = batch["x"], batch["yz"]
        total = x + y * z + sum(rest) + more["bias"]
        return {"total": total, "parts": [x * 2, (y, None)], "mode": mode, "n": 3, "flags": flags}

    def args():
        x, y, z, r, b = (torch.randn(3) for _ in range(5))
        return ({"x": x, "yz": (y, z)}, [True, 2], r), {"bias": b}

    given, named = args()
    package = pack(fn, desugar.call(*given, **named))
    given, named = args()
    check(package, fn, *given, **named)
    assert (
        package(*given, **named)["parts"][1][0] is given[0]["yz"][0]
    )  # an argument stays the object that it is
    with pytest.raises(SignatureError, match=r"batch: expected the keys \['x', 'yz'\]"):
        package({"yz": given[0]["yz"], "x": given[0]["x"]}, *given[1:], **named)
    with pytest.raises(SignatureError, match=r"batch\['yz'\]: expected a tuple, got a list"):
        package({"x": given[0]["x"], "yz": list(given[0]["yz"])}, *given[1:], **named)
    with pytest.raises(SignatureError, match="mode"):
        package(*given, mode="mean", **named)
    with pytest.raises(SignatureError, match=r"flags\[0\]: expected True"):
        package(given[0], [1, 2], *given[2:], **named)


def test_parameters_with_the_names_of_functions(pack):
    def fn(type, len, isinstance=None):
        return type + len

    package = pack(fn, desugar.call(torch.randn(3), torch.randn(3)))
    check(package, fn, torch.randn(3), torch.randn(3))


def test_a_registered_container_is_given_at_loading(pack):
    from torch.utils import _pytree

    class Box:
        def __init__(self, value):
            self.value = value

    Box.__qualname__ = "Box"
    _pytree.register_pytree_node(Box, lambda box: ([box.value], None), lambda parts, _: Box(*parts))
    try:
        desugar.save(
            pack.path, lambda box: Box(box.value * 2), desugar.call(Box(torch.ones(2))), native=False
        )
        with pytest.raises(PackageError, match=r"pass classes=\[Box\]"):
            desugar.load(pack.path, native=False)
        package = desugar.load(pack.path, classes=[Box], native=False)
        assert package(Box(torch.ones(2))).value.tolist() == [2, 2]
        with pytest.raises(SignatureError, match="box: expected a Box"):
            package(torch.ones(2))
    finally:
        del _pytree.SUPPORTED_NODES[Box]


def test_one_object_in_two_arguments(pack):
    def fn(x, y):
        return x * 2 + y

    x = torch.randn(3)
    package = pack(fn, desugar.call(x, x), desugar.call(x, torch.randn(3)))
    y = torch.randn(3)
    check(package, fn, y, y)
    check(package, fn, y, torch.randn(3))
    alone = pack(fn, desugar.call(x, x))
    with pytest.raises(SignatureError, match="y: expected the same object as x"):
        alone(x, y)


def test_results_that_are_no_new_tensors(pack):
    def fn(x, y):
        return x, x.detach(), y[1:], y.view(2, 3), (x * 2).view(-1)

    package = pack(fn, desugar.call(torch.randn(2, 3), torch.randn(6)))
    x, y = torch.randn(2, 3), torch.randn(6)
    check(package, fn, x, y)
    got = package(x, y)
    assert got[0] is x
    assert [r.data_ptr() for r in got[1:4]] == [x.data_ptr(), y[1:].data_ptr(), y.data_ptr()]


def test_an_unused_argument_may_be_any_tensor(pack):
    package = pack(lambda x, y: x + 1, desugar.call(torch.ones(2), torch.ones(3)))
    check(package, lambda x, y: x + 1, torch.ones(2), torch.ones(5, 5))
    with pytest.raises(SignatureError, match="y: expected a tensor"):
        package(torch.ones(2), None)


# ----------------------------------------------------------------------------------------------------- sizes


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore:var_mean")  # of no rows
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_dynamic_sizes(pack, size):
    model = Block()
    package = pack(model, desugar.call(torch.randn(4, 8)), dynamic=True)
    check(package, model, torch.randn(size, 8))


def test_equal_sizes_are_one_only_if_the_function_needs_it(pack):
    def fn(x, y):
        return x.sum(0) + y.sum(0)

    package = pack(fn, desugar.call(torch.randn(4, 3), torch.randn(4, 3)), dynamic=True)
    check(package, fn, torch.randn(2, 5), torch.randn(9, 5))
    with pytest.raises(SignatureError, match=r"y.size\(1\): expected x.size\(1\) = 3, got 4"):
        package(torch.randn(2, 3), torch.randn(2, 4))


def test_a_static_batch_of_another_size(pack):
    """What PyTorch's own export took: a program for batch 4 that was given batch 5, and returned garbage."""
    model = Block()
    package = pack(model, desugar.call(torch.randn(4, 8)))
    with pytest.raises(SignatureError, match=r"x.size\(0\): expected 4, got 5") as caught:
        package(torch.randn(5, 8))
    assert (caught.value.argument, caught.value.expected, caught.value.got) == ("x.size(0)", "4", "5")


def test_conditions_on_sizes(pack):
    def fn(x):
        return x.view(-1, 2).sum(1) if x.shape[0] > 4 else x * 2

    package = pack(fn, desugar.call(torch.randn(6)), desugar.call(torch.randn(2)), dynamic=True)
    for n in (6, 10, 2, 3):
        check(package, fn, torch.randn(n))
    long = pack(fn, desugar.call(torch.randn(6)), dynamic=True)
    with pytest.raises(SignatureError, match=r"x.size\(0\)"):
        long(torch.randn(3))
    with pytest.raises(SignatureError, match=r"x.size\(0\)"):
        long(torch.randn(7))  # odd


def test_ints(pack):
    def fn(x, n):
        return x * n, n + x.shape[0], x.shape

    package = pack(fn, desugar.call(torch.randn(3), 5), dynamic=True)
    for n in (5, 0, 1):
        check(package, fn, torch.randn(n + 4), n)
    with pytest.raises(SignatureError, match="n: expected at least 0, got -4"):
        package(torch.randn(3), -4)
    with pytest.raises(SignatureError, match="n: expected an int, got True"):
        package(torch.randn(3), True)
    constant = pack(fn, desugar.call(torch.randn(3), 5))
    with pytest.raises(SignatureError, match="n: expected 5"):
        constant(torch.randn(3), 6)


def test_strides(pack):
    package = pack(lambda x: x * 2, desugar.call(torch.randn(4, 3)), dynamic=True)
    check(package, lambda x: x * 2, torch.randn(6, 3))
    with pytest.raises(SignatureError, match=r"x.stride\("):
        package(torch.randn(3, 6).t())
    check(package, lambda x: x * 2, torch.randn(2, 3)[:1])  # the stride of one row is none
    check(package, lambda x: x * 2, torch.randn(8, 3)[::8])


# ----------------------------------------------------------------------------------------------------- classes


@pytest.mark.parametrize("cls", [JaggedTensor, PaddedTensor])
def test_rows_of_other_lengths(pack, cls):
    model = Block()
    package = pack(model, desugar.call(rows(3, 5, 2, cls=cls)))
    for lengths in [(3, 5, 2), (1, 0, 5)]:
        check(package, model, rows(*lengths, cls=cls))
    if cls is JaggedTensor:
        for lengths in [(7,), (0, 2), (1, 1), (0, 0, 9, 1)]:
            check(package, model, rows(*lengths))
    with pytest.raises(SignatureError, match=f"x: expected a {cls.__name__}, got one of torch.float32"):
        package(torch.randn(3, 5, 8))
    with pytest.raises(SignatureError, match="float64"):
        package(rows(3, 5, cls=cls).double())
    with pytest.raises(SignatureError, match="expected 8, got 9"):
        package(rows(3, 5, 2, width=9, cls=cls))


def convolved(x):
    """Each row shorter by one entry: as many entries in all as only the data tells."""
    return torch.nn.functional.conv1d(x.mT, torch.ones(8, 8, 2)).mT


@pytest.mark.slow
def test_a_size_that_data_determines(pack):
    package = pack(lambda x: convolved(x).values.mean(), desugar.call(rows(3, 5, 2)))
    for lengths in [(3, 5, 2), (4, 2), (2, 7, 3, 2)]:
        check(package, lambda x: convolved(x).values.mean(), rows(*lengths))
    with pytest.raises(PackageError, match="a size depends on data"):
        pack(convolved, desugar.call(rows(3, 5, 2)))


@pytest.mark.slow
def test_a_size_that_data_determines_in_machine_code(tmp_path):
    desugar.save(tmp_path / "mean.pt2", lambda x: convolved(x).values.mean(), desugar.call(rows(3, 5, 2)))
    for native in (True, False):
        package = desugar.load(tmp_path / "mean.pt2", classes=(JaggedTensor,), native=native)
        for lengths in [(3, 5, 2), (4, 2)]:
            check(package, lambda x: convolved(x).values.mean(), rows(*lengths))


def test_int8_weights(pack):
    model = Block(32)
    quantize_(model, Int8WeightOnlyConfig())
    package = pack(model, desugar.call(torch.randn(4, 32)), dynamic=True)
    check(package, model, torch.randn(7, 32))
    assert isinstance(package.state["first.weight"], Int8Tensor)
    assert isinstance(package.state["first.weight"], nn.Parameter)


def test_wrappers_made_inside_and_returned(pack):
    def fn(x, offsets):
        made = JaggedTensor(x * 2, offsets, max_length=5)
        return made, made.sum(1), Scaled(x, factor=3.0)

    given = torch.randn(6, 2), torch.tensor([0, 1, 6])
    package = pack(fn, desugar.call(*given), classes=[Scaled])
    check(package, fn, *given)


def test_a_declared_class_of_the_users_own(pack):
    def fn(x):
        return x + 1, x.raw * 2

    package = pack(fn, desugar.call(Scaled(torch.randn(3))), classes=[Scaled])
    check(package, fn, Scaled(torch.randn(3)))
    with pytest.raises(SignatureError, match=r"x: expected Scaled\(factor=2.0\), got Scaled\(factor=3.0\)"):
        package(Scaled(torch.randn(3), factor=3.0))
    with pytest.raises(PackageError, match=r"pass classes=\[Scaled\]"):
        desugar.load(pack.path, native=False)


def test_a_class_that_was_declared_anew(pack):
    desugar.save(pack.path, lambda x: x + 1, desugar.call(Scaled(torch.randn(3))), native=False)

    class Changed(TensorSubclass, fallback="materialize"):
        raw: Tensor = inner()
        factor: float = static(default=2.0)
        more: int = static(default=0)

        def materialize(self):
            return self.raw * self.factor

    Changed.__qualname__, Changed.__module__ = Scaled.__qualname__, Scaled.__module__
    with pytest.raises(PackageError, match="is declared differently"):
        desugar.load(pack.path, classes=[Changed], native=False)


# ----------------------------------------------------------------------------------------------------- weights


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.tied = self.norm.weight

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(x) * self.tied + self.calls


def test_buffers_change_with_each_call(pack):
    model = Counter()
    package = pack(model, desugar.call(torch.randn(4, 3)), dynamic=True)
    assert model.calls == 0  # saving runs nothing
    for n in (4, 6, 3):
        check(package, model, torch.randn(n, 3))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(package.state[name], buffer)


def test_weights_shared_with_a_module(pack):
    model = Counter()
    package = pack(model, desugar.call(torch.randn(4, 3)), weights=False, state=model)
    with torch.no_grad():
        package(torch.randn(4, 3))
        model.norm.weight.mul_(2)
        x = torch.randn(4, 3)
        got, calls = package(x), model.calls.clone()
    assert calls == 2
    model.eval()
    assert got.shape == model(x).shape
    assert package.state["tied"] is model.norm.weight
    with pytest.raises(SignatureError, match="weight tied: expected a call under"):
        package(torch.randn(4, 3))


def test_weights_that_are_given(pack):
    model = Block()
    desugar.save(pack.path, model, desugar.call(torch.randn(4, 8)), weights=False, native=False)
    with pytest.raises(PackageError, match="has no weights: it was saved with weights=False"):
        desugar.load(pack.path, native=False)
    other = Block()
    package = desugar.load(pack.path, state=other.state_dict(), native=False)
    check(package, other, torch.randn(4, 8))
    rest = {name: tensor for name, tensor in other.state_dict().items() if name != "first.weight"}
    with pytest.raises(PackageError, match=r"state lacks 1 of the 6 weights: first\.weight"):
        desugar.load(pack.path, state=rest, native=False)
    with pytest.raises(PackageError, match=r"weight first.weight.size\(1\): expected 8, got 9"):
        desugar.load(pack.path, state=Block(9), native=False)


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.embedding(index))


@pytest.mark.parametrize("held", [False, True])
def test_tied_weights_that_are_given(pack, held):
    model, other, untied = Tied(), Tied(), Tied()
    fn = (lambda index: model(index) + 1) if held else model
    index, prefix = torch.tensor([1, 6]), "model." if held else ""

    def load(state):
        return desugar.load(pack.path, state=state, native=False)

    assert list(pack(fn, desugar.call(index)).state) == [f"{prefix}embedding.weight"]
    desugar.save(pack.path, fn, desugar.call(index), weights=False, native=False)
    tensors = {f"{prefix}{name}": tensor for name, tensor in other.state_dict().items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    last = {f"{prefix}head.weight": other.head.weight}  # as files that keep one of them do
    for state in ({"model": other} if held else other, tensors, copies, last):
        with torch.no_grad():
            assert torch.equal(load(state)(index), other(index) + (1 if held else 0))
    untied.head.weight = nn.Parameter(torch.randn(7, 4))
    with pytest.raises(PackageError, match=r"embedding\.weight and .*head\.weight were one weight when"):
        load({"model": untied} if held else untied)


def test_a_function_that_holds_a_module(pack):
    model, table = Block(), torch.randn(8)

    def fn(x):
        return model(x) + table

    package = pack(fn, desugar.call(torch.randn(4, 8)))
    check(package, fn, torch.randn(4, 8))
    assert "model.first.weight" in package.state and "table" in package.state
    shared = desugar.load(pack.path, state={"model": model, "table": table}, native=False)
    check(shared, fn, torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_saved(pack, tmp_path):
    seen = []

    def appends(x):
        seen.append(x * 2)
        return x + 1

    class Assigns(nn.Module):
        def forward(self, x):
            self.last = x
            return x + 1

    with pytest.raises(PackageError, match="changes objects besides tensors"):
        desugar.save(pack.path, appends, desugar.call(torch.ones(2)), native=False)
    assert seen == []
    with pytest.raises(PackageError, match="changes objects besides tensors"):
        desugar.save(pack.path, Assigns(), desugar.call(torch.ones(2)), native=False)
    with pytest.raises(PackageError, match="computes nothing with tensors"):
        desugar.save(pack.path, lambda x: 3, desugar.call(torch.ones(2)), native=False)
    with pytest.raises(PackageError, match="x: expected tensors, numbers, text"):
        desugar.save(pack.path, lambda x: x, desugar.call(object()), native=False)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        desugar.save(
            pack.path, lambda x: x + 1 if x.sum() > 0 else x, desugar.call(torch.ones(2)), native=False
        )
    with torch.autocast("cpu"), pytest.raises(PackageError, match=r"outside of torch\.autocast"):
        desugar.save(pack.path, lambda x: x + 1, desugar.call(torch.ones(2)), native=False)
    with pytest.raises(TypeError, match=r"desugar.call\(x, y\)"):
        desugar.save(pack.path, lambda x: x + 1)
    with pytest.raises(TypeError, match=r"expected desugar\.call"):
        desugar.save(pack.path, lambda x: x + 1, torch.ones(2))
    with pytest.raises(ValueError, match=r"ends in \.pt2"):
        desugar.save(tmp_path / "a.zip", lambda x: x + 1, desugar.call(torch.ones(2)))
    with pytest.raises(FileNotFoundError, match="no folder"):
        desugar.save(tmp_path / "a" / "b.pt2", lambda x: x + 1, desugar.call(torch.ones(2)))
    assert not pack.path.exists() and list(tmp_path.iterdir()) == []


def test_modes_that_a_program_does_not_know(pack):
    package = pack(lambda x: x @ x, desugar.call(torch.randn(3, 3)))
    x = torch.randn(3, 3)
    with torch.autocast("cpu"), pytest.raises(SignatureError, match="autocast: expected a call outside"):
        package(x)
    with pytest.raises(SignatureError, match="x: expected a tensor that does not require grad"):
        package(x.clone().requires_grad_())
    with pytest.raises(SignatureError, match="x: expected a plain tensor"):
        torch.vmap(package)(torch.randn(2, 3, 3))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check(package, lambda x: x @ x, x)
            with pytest.raises(SignatureError, match=r"pass its detach\(\)"):
                package(x.clone().requires_grad_())


def test_memory_that_is_shared_with_a_written_argument(pack):
    def fn(x, y):
        x.add_(1)
        return x * y

    package = pack(fn, desugar.call(torch.randn(3), torch.randn(3)))
    one, other = torch.randn(3), torch.randn(3)
    mine, expected = one.clone(), one.clone()
    assert_same(package(mine, other), fn(expected, other))
    assert_same(mine, expected)
    whole = torch.randn(4)
    before = whole.clone()
    with pytest.raises(SignatureError, match="pass clones"):
        package(whole[:3], whole[1:])
    assert torch.equal(whole, before)
