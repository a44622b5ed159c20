"""Fields declared ``inner(differentiable=True)``, and ``materialize``: no gradient is lost, eagerly or compiled."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
from subclasses import DispatchError, SpecError, TensorSubclass, inner, static
from subclasses.keyed import KeyedJaggedTensor
from subclasses.layout import intern_layout
from subclasses.ragged import JaggedTensor, PaddedTensor

DOORS = {
    "eager": lambda fn: fn,
    "graphs": lambda fn: torch.compile(fn, backend="eager", fullgraph=True),
    "stock": lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
    "desugar.compile": lambda fn: desugar.compile(fn, backend="eager", fullgraph=True, strict=True),
    "backend": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}, fullgraph=True),
}


class Mixed(TensorSubclass, fallback="map"):
    """One field of each kind."""

    a: Tensor = inner(differentiable=True)
    raw: Tensor = inner()
    index: Tensor | None = inner(dtype=torch.int64, optional=True)
    more: Tensor | None = inner(optional=True, differentiable=True)
    power: int = static(default=1)


class Low(TensorSubclass, fallback="materialize"):
    """A product of two factors that are read raw, as authors write it."""

    left: Tensor = inner()
    right: Tensor = inner()
    times: int = static(default=3)

    @staticmethod
    def outer(left, right):
        from subclasses.spec.fields import Outer

        return Outer((left.shape[0], right.shape[1]))

    def materialize(self) -> Tensor:
        return self.left @ self.right * self.times


class Lower(Low):
    def materialize(self) -> Tensor:
        return super().materialize() + self.left.sum()


def gradients(fn, *tensors):
    """The result of a function of fresh leaves, and the gradient of each; None where nothing flows."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = fn(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, allow_unused=True)


def same_gradients(door, fn, plain, *tensors):
    fn = DOORS[door](fn)
    for scale in (1, 2):  # the second call of a compiled function runs what the first one made
        given = [t * scale for t in tensors]
        torch.testing.assert_close(gradients(fn, *given), gradients(plain, *given))


def random(*sizes, dtype=torch.float64):
    return [torch.randn(size, dtype=dtype) for size in sizes]


# ---- reading -----------------------------------------------------------------------------------------------


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", DOORS)
def test_a_reading_is_differentiable(door):
    def built_inside(a, raw):
        x = Mixed(a, raw)
        return (x.a.sin() * x.a).sum()

    def computed(a, raw):
        return ((Mixed(a, raw) * 2).cos().a * 3).sum()

    def whole_and_part(a, raw):
        x = Mixed(a, raw)
        return (x.a * (x * x).a).sum()

    a, raw = random((2, 3), (2, 3))
    same_gradients(door, built_inside, lambda a, raw: (a.sin() * a).sum() + 0 * raw.sum(), a, raw)
    same_gradients(door, computed, lambda a, raw: ((a * 2).cos() * 3).sum() + 0 * raw.sum(), a, raw)
    same_gradients(door, whole_and_part, lambda a, raw: (a**3).sum() + 0 * raw.sum(), a, raw)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
def test_a_reading_of_an_argument_is_differentiable(door):
    fn = DOORS[door](lambda x: (x.a.sin() * x.more).sum())
    for _ in range(2):
        leaf = Mixed(*random((2, 3), (2, 3)), more=torch.ones(4, 2, 3, dtype=torch.float64)).requires_grad_()
        fn(leaf).backward()
        torch.testing.assert_close(leaf.grad.a, 4 * leaf.detach().a.cos())
        torch.testing.assert_close(leaf.grad.more, leaf.detach().a.sin().expand(4, 2, 3))
        assert leaf.grad.raw.count_nonzero() == 0
        a, more = (t.requires_grad_() for t in random((2, 3), (2, 3)))
        fn(Mixed(a, torch.ones(2, 3, dtype=a.dtype), more=more)).backward()
        torch.testing.assert_close((a.grad, more.grad), ((a.cos() * more).detach(), a.sin().detach()))


@pytest.mark.parametrize("door", DOORS)
def test_a_reading_under_no_grad_is_not(door):
    def fn(x):
        with torch.no_grad():
            frozen = x.a * 2
        return (frozen * x.a).sum(), frozen

    x = Mixed(*random((2, 3), (2, 3))).requires_grad_()
    out, frozen = DOORS[door](fn)(x)
    assert not frozen.requires_grad
    out.backward()
    torch.testing.assert_close(x.grad.a, frozen)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
def test_a_reading_after_a_write_sees_it(door):
    def fn(x):
        y = x * 1
        y.mul_(2)
        x.mul_(3)
        return y.a.sum() + (x.a * x.a).sum()

    a, raw = random((2, 3), (2, 3))
    got = gradients(DOORS[door](lambda a, raw: fn(Mixed(a, raw) * 1)), a, raw)
    torch.testing.assert_close(got, (2 * a.sum() + 9 * (a * a).sum(), (2 + 18 * a, torch.zeros_like(raw))))
    x = Mixed(a.clone(), raw.clone())
    torch.testing.assert_close(DOORS[door](fn)(x), 2 * a.sum() + 9 * (a * a).sum())


def test_where_autograd_does_not_record_it_is_the_inner_tensor_itself():
    a, raw = random((2,), (2,))
    x = Mixed(a, raw)
    assert x.a is a and x.raw is raw and x.more is None and x.index is None
    x.requires_grad_()
    assert x.a is not x.a and x.a.requires_grad and x.raw is raw and x.more is None
    with torch.no_grad():
        assert x.a is a
    with torch.inference_mode():
        assert x.a is a
    assert x.detach().a.data_ptr() == a.data_ptr() and not x.detach().a.requires_grad
    seen = []
    Recorded = type("Recorded", (Mixed,), {})
    Recorded.implements(torch.ops.aten.tan.default)(lambda func, x: (seen.append(x.a), x)[1])
    Recorded(a, raw).requires_grad_().tan()
    assert torch.equal(seen[0], a) and seen[0].requires_grad  # a rule runs once, where autograd records


def test_an_author_may_give_an_index_and_a_half_precision_tensor_the_same_field():
    for dtype in (torch.bfloat16, torch.complex64, torch.float64):
        x = Mixed(torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)).requires_grad_()
        assert x.a.requires_grad and x.a.dtype == dtype
    x = Mixed(torch.ones(2), torch.ones(2), more=torch.arange(2)).requires_grad_()
    assert not x.more.requires_grad and x.more.tolist() == [0, 1]


@pytest.mark.parametrize("size", [(0,), (1,), (0, 3), ()])
def test_sizes(size):
    a, raw = random(size, size)
    same_gradients(
        "eager", lambda a, raw: Mixed(a, raw).a.sum(), lambda a, raw: a.sum() + 0 * raw.sum(), a, raw
    )


def test_a_write_to_a_reading_is_refused():
    x = Mixed(*random((2,), (2,))).requires_grad_()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        x.a.add_(1)
    with torch.no_grad():
        x.a.add_(1)  # the inner tensor itself, as before


def test_second_derivatives():
    a, raw = (t.requires_grad_() for t in random((2,), (2,)))
    assert torch.autograd.gradgradcheck(lambda a, raw: Mixed(a, raw).a ** 3, (a, raw))
    assert torch.autograd.gradcheck(
        lambda a, raw: Low(a, raw).materialize(), [t.requires_grad_() for t in random((2, 2), (2, 2))]
    )


def test_assigning_printing_copying():
    a, raw = random((2,), (2,))
    x = Mixed(a, raw)
    x.a = raw
    assert x.a is raw and "a=tensor" in repr(x) and "_raw_" not in repr(x)
    with pytest.raises(ValueError, match=r"Mixed\.a: .* would|Mixed\.a: would change the outer shape"):
        x.a = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Mixed\.a: inner tensors are stored raw"):
        x.a = a.clone().requires_grad_()
    x = Mixed(a, raw, more=a * 2, power=2).requires_grad_()
    assert "_raw_" not in repr(x) and "requires_grad=True" in repr(x)
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), saved(x)):
        assert y.requires_grad and y.power == 2 and y._layout is x._layout
        torch.testing.assert_close(y.detach().a, a)
        torch.testing.assert_close(y.detach().more, a * 2)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_layout_is_pickled_by_the_names_of_fields():
    """So files load that were written before a field became differentiable."""
    layout = Mixed(*random((2,), (2,)))._layout
    assert layout.__reduce__()[1][2] == ("a", "raw")
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert intern_layout(Mixed, (1,), ("a", "raw")) is layout
    assert "_raw_" not in repr(layout)


def test_what_torch_takes_a_value_apart_by():
    x = Mixed(*random((2,), (2,))).requires_grad_()
    names, _ = x.__tensor_flatten__()
    assert names == ["_raw_a", "raw"]
    assert not getattr(x, names[0]).requires_grad


def test_vmap_over_a_function_that_reads():
    a, raw = random((3,), (3,))
    x = Mixed(a, raw).requires_grad_()
    rows = torch.randn(4, 3, dtype=torch.float64)
    out = torch.vmap(lambda row: (x.unwrap("a") * row).sum() + (x.a * row).sum())(rows)
    torch.testing.assert_close(out, 2 * rows @ a)
    out.sum().backward()
    torch.testing.assert_close(x.grad.a, 2 * rows.sum(0))


# ---- declarations ------------------------------------------------------------------------------------------


def test_declarations_that_contradict_themselves():
    with pytest.raises(SpecError, match=r"Bad\.a: a tensor of torch\.int64 has no gradient; remove"):
        type(
            "Bad",
            (TensorSubclass,),
            {"__annotations__": {"a": Tensor}, "a": inner(dtype=torch.int64, differentiable=True)},
        )
    with pytest.raises(SpecError, match=r"Child\.a: a base of the class declares it differentiable; write"):
        type("Child", (Mixed,), {"__annotations__": {"a": Tensor}, "a": inner()})
    child = type("Child", (Mixed,), {"__annotations__": {"raw": Tensor}, "raw": inner(differentiable=True)})
    x = child(*random((2,), (2,))).requires_grad_()
    assert x.raw.requires_grad and x.a.requires_grad


# ---- materialize -------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("cls", [Low, Lower])
def test_materialize_is_differentiable_for_every_caller(door, cls):
    def plain(left, right):
        found = left @ right * 3
        found = found + left.sum() if cls is Lower else found
        return (found.sin() * found).sum()

    def built_inside(left, right):
        x = cls(left, right)
        return (x.materialize().sin() * x).sum()

    left, right = random((2, 3), (3, 4))
    same_gradients(door, built_inside, plain, left, right)
    fn = DOORS[door](lambda x: (x.materialize().sin() * x.materialize()).sum())
    same_gradients("eager", lambda left, right: fn(cls(left, right)), plain, left, right)
    leaf = cls(left, right).requires_grad_()
    fn(leaf).backward()
    expected = gradients(plain, left, right)[1]
    torch.testing.assert_close((leaf.grad.left, leaf.grad.right), expected)


def test_materialize_without_gradients_records_nothing():
    x = Low(*random((2, 3), (3, 4)))
    assert not x.materialize().requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not x.materialize().requires_grad
    assert x.materialize().requires_grad and (x * 2).requires_grad


# ---- a part in a compiled function, the whole outside of it ------------------------------------------------


def whole_and_part(part, left, right):
    x = Low(left, right)
    return part(x) + x.cos().sum() + part(x)


@pytest.mark.parametrize("door", ["eager", "desugar.compile", "backend"])
@pytest.mark.parametrize("read", [lambda x: x.unwrap("left").sum(), lambda x: x.materialize().sin().sum()])
def test_a_gradient_of_a_part_is_added_to_a_plain_one(door, read):
    """AOTAutograd has no place for what the sum needs: there it is an error."""
    part = DOORS[door](read)
    tensors = random((2, 3), (3, 4))
    got = gradients(lambda left, right: whole_and_part(part, left, right), *tensors)
    torch.testing.assert_close(
        got, gradients(lambda left, right: whole_and_part(read, left, right), *tensors)
    )
    leaf, plain = (Low(*tensors).requires_grad_() for _ in range(2))
    (part(leaf) + leaf.cos().sum()).backward()
    (read(plain) + plain.materialize().cos().sum()).backward()
    torch.testing.assert_close(leaf.grad.unwrap(), plain.grad.unwrap())


@pytest.mark.parametrize("door", ["eager", "desugar.compile", "backend"])
def test_not_with_inner_tensors_that_changed_meanwhile(door):
    x = Low(*random((2, 3), (3, 4))).requires_grad_()
    out = DOORS[door](lambda x: x.unwrap("left").sum())(x) + x.cos().sum()
    x.left.mul_(2)
    with pytest.raises(DispatchError, match="one of them was modified by an in-place operation since"):
        out.backward()


# ---- the classes of the package ----------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
def test_the_values_of_ragged_tensors(door):
    offsets, targets = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 2, 0, 1])

    def jagged(values):
        return F.cross_entropy((JaggedTensor(values, offsets, max_length=3) * 2).values, targets)

    (values,) = random((5, 3))
    same_gradients(door, jagged, lambda values: F.cross_entropy(values * 2, targets), values)

    lengths = torch.tensor([2, 0, 3])

    def padded(table):
        return (PaddedTensor(table, lengths).padded * 2).sin().sum()

    (table,) = random((3, 3, 2))
    exists = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).unsqueeze(-1)
    same_gradients(door, padded, lambda table: (table * exists * 2).sin().sum(), table)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", DOORS)
def test_the_weights_of_keyed_tensors(door):
    fn = DOORS[door](lambda x: (x.weights * x.weights).sum())
    weights = torch.rand(4, requires_grad=True)
    x = KeyedJaggedTensor(["k"], torch.arange(4), torch.tensor([1, 3]), weights=weights)
    fn(x).backward()
    torch.testing.assert_close(weights.grad, 2 * weights.detach())
    assert x.values.dtype == torch.int64 and not x.values.requires_grad


# ---- inside transforms of torch.func -----------------------------------------------------------------------


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda v: torch.func.grad(f)(v).square().sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(f))(torch.stack([x, x + 1])),
    "grad of vmap": lambda f, x: torch.func.grad(lambda v: torch.vmap(f)(torch.stack([v, 2 * v])).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("learned", [True, False], ids=["requires grad", "frozen"])
@pytest.mark.parametrize("grads", [True, False], ids=["grad", "no_grad"])
def test_a_value_from_outside_of_a_transform(transform, learned, grads):
    plain = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    plain = [t.requires_grad_(learned) for t in plain]
    pair = Mixed(*plain)

    def by_values(v):
        a, b = pair.unwrap("a"), pair.unwrap("raw")
        return (a * v.sin() + b).square().sum() + (pair.a * v).sum()

    def by_tensors(v):
        return (plain[0] * v.sin() + plain[1]).square().sum() + (plain[0] * v).sum()

    x = torch.tensor([0.5, 0.25])
    with torch.set_grad_enabled(grads):
        got, expected = transform(by_values, x), transform(by_tensors, x)
    torch.testing.assert_close(got, expected)
    assert got.requires_grad == expected.requires_grad == (learned and grads)
    if got.requires_grad:
        ours, theirs = (torch.autograd.grad(y.sum(), plain, allow_unused=True) for y in (got, expected))
        torch.testing.assert_close(ours, theirs)
