"""``fallback="views"``: what maps, what is refused, and that no view of an inner tensor is silently wrong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import desugar
import subclasses
from subclasses import DispatchError, Outer, TensorSubclass, inner, static
from subclasses.dispatch.mapping import is_view
from tests.subclasses.subjects import MODES, assert_same

aten = torch.ops.aten


class Located(TensorSubclass, fallback="views"):
    """A mean and a deviation for each entry, which have no meaning under a nonlinear op."""

    mean: Tensor = inner()
    deviation: Tensor = inner(differentiable=True)
    unit: str = static(default="m")


class Scaled(TensorSubclass, dtype_from="scale", fallback="views"):
    """Quantized rows with a scale for each."""

    qdata: Tensor = inner(dtype=torch.int8)
    scale: Tensor = inner()

    def materialize(self):
        return self.qdata * self.scale


class Repeated(TensorSubclass, fallback="views"):
    """An outer size that equals the inner one before a view, and not after it."""

    row: Tensor = inner()

    @staticmethod
    def outer(row):
        return Outer((4, 3))


def located(*size, grad=False):
    return Located(torch.randn(size or (4, 3)), torch.rand(size or (4, 3))).requires_grad_(grad)


VIEWS = {
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.view(2, 6),
    "reshape": lambda x: x.t().reshape(12),
    "select": lambda x: x[1],
    "slice": lambda x: x[1:, ::2],
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 3),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind(1)[0],
    "chunk": lambda x: x.chunk(2)[0],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "flatten": lambda x: x.flatten(),
}


COMPILERS = pytest.mark.parametrize(
    "compiler",
    [
        lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True),
        lambda fn: desugar.compile(fn, backend="eager"),
    ],
    ids=["aot_eager", "desugar"],
)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_a_view_of_each_inner_tensor(name):
    x, fn = located(), VIEWS[name]
    y = fn(x)
    assert type(y) is Located
    assert y.unit == "m"
    assert y.shape == fn(torch.empty(4, 3)).shape
    assert torch.equal(y.mean, fn(x.mean))
    assert torch.equal(y.deviation, fn(x.deviation))
    if name != "reshape":
        assert y._is_view()
        assert y.mean.untyped_storage().data_ptr() == x.mean.untyped_storage().data_ptr()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", VIEWS)
@COMPILERS
def test_a_compiled_view_is_the_same(name, compiler):
    x = located()
    assert_same(compiler(VIEWS[name])(x), VIEWS[name](x))
    torch.compiler.reset()


@COMPILERS
def test_a_compiled_gradient_is_the_same(compiler):
    def fn(x):
        return x.t()[1:].reshape(8).unwrap("mean") ** 2

    mean, deviation = torch.randn(4, 3, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    grads = [
        torch.autograd.grad(f(Located(mean, deviation)).sum(), (mean, deviation)) for f in (fn, compiler(fn))
    ]
    assert all(map(torch.equal, *grads))
    torch.compiler.reset()


# Their derivatives join the gradients of several results.
@pytest.mark.parametrize("name", VIEWS)
def test_the_gradient_of_a_view_has_the_class(name):
    mean, deviation = torch.randn(4, 3, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    VIEWS[name](Located(mean, deviation)).unwrap("mean").square().sum().backward()
    expected = torch.autograd.grad(VIEWS[name](mean).square().sum(), mean)[0]
    assert torch.equal(mean.grad, expected)
    assert torch.equal(deviation.grad, torch.zeros(4, 3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.transpose_(0, 1),
        lambda x: x[:, :1].squeeze_(),
    ],
)
def test_an_in_place_view(fn):
    x = located()
    plain = x.mean.clone()
    expected = fn(plain)
    out = fn(x)
    assert out.shape == expected.shape
    assert torch.equal(out.mean, expected)
    assert (x.shape, x.stride()) == (plain.shape, plain.stride())


def test_a_write_to_a_view_reaches_the_base():
    x, row = located(), located(3)
    x[1].copy_(row)
    assert torch.equal(x.mean[1], row.mean)
    assert torch.equal(x.deviation[1], row.deviation)
    x[0] = row
    assert torch.equal(x.deviation[0], row.deviation)


def test_a_copy_of_a_view_into_a_given_tensor():
    x, out = located(), located(3, 4)
    assert torch.transpose_copy(x, 0, 1, out=out) is out
    assert torch.equal(out.mean, x.mean.t())
    with pytest.raises(DispatchError, match="plain tensor"):
        torch.transpose_copy(x, 0, 1, out=torch.empty(3, 4))


def test_copies_conversions_and_factories():
    x = located()
    assert x.clone().mean.data_ptr() != x.mean.data_ptr()
    assert x.t().contiguous().mean.is_contiguous()
    half = x.to(torch.float16)
    assert (half.dtype, half.mean.dtype, half.deviation.dtype) == (torch.float16,) * 3
    assert x.to("meta").deviation.is_meta
    for make in (torch.zeros_like, lambda x: x.new_zeros(2, 5), lambda x: torch.full_like(x, 3.0)):
        made = make(x)
        assert type(made) is Located
        assert torch.equal(made.deviation, make(x.deviation))
    assert x.new_empty(7).mean.shape == (7,)


REFUSED = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.exp.default": lambda x: x.exp(),
    "aten.mm.default": lambda x: x.t() @ x,
    "aten.sum.default": lambda x: x.sum(),
    "aten.fill_.Scalar": lambda x: x[0].fill_(1.0),
    "aten.copy_.default": lambda x: x.copy_(torch.zeros(4, 3)),
    "aten.add.out": lambda x: torch.add(x, x, out=x),
    "aten.index.Tensor": lambda x: x[torch.tensor([0, 1])],
    "aten.cat.default": lambda x: torch.cat([x, x]),
    "aten.view.dtype": lambda x: x.view(torch.int32),
    "aten.resize_.default": lambda x: x.resize_(2, 3),
    "aten._conj.default": lambda x: Located(x.mean + 0j, x.mean + 0j).conj(),
}


@pytest.mark.parametrize("op", REFUSED)
def test_every_other_op_names_itself_and_the_rule(op):
    with pytest.raises(DispatchError) as caught:
        REFUSED[op](located())
    assert f"Located has no rule for {op}(" in str(caught.value)
    assert f"@Located.implements(torch.ops.{op})" in str(caught.value)


@pytest.mark.parametrize("fn", [REFUSED["aten.exp.default"], REFUSED["aten.add.Tensor"]])
@pytest.mark.parametrize("backend", ["aot_eager", "desugar"])
def test_a_refusal_under_a_compiler_is_the_same(fn, backend):
    compiled = (
        desugar.compile(fn, backend="eager") if backend == "desugar" else torch.compile(fn, backend=backend)
    )
    with pytest.raises(Exception, match=r"@Located\.implements"):
        compiled(located())
    torch.compiler.reset()


def scaled():
    return Scaled(torch.randint(-9, 9, (4, 3), dtype=torch.int8), torch.rand(4, 1))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w.t(),
        lambda w: w.t_(),
        lambda w: w.view(12),
        lambda w: w[:, 1],
        lambda w: w[1:],
        lambda w: w.split(2),
        lambda w: w.new_empty(3),
        lambda w: w.as_strided((2,), (3,)),
        lambda w: torch.ops.aten.t_copy(w),
    ],
)
def test_a_view_of_an_inner_tensor_of_another_size_is_refused(fn):
    w = scaled()
    with pytest.raises(DispatchError, match=r"'scale' has size \(4, 1\).*@Scaled\.implements"):
        fn(w)
    assert w.shape == w.qdata.shape == (4, 3)


def test_what_names_no_dim_maps_whatever_the_sizes():
    w = scaled()
    assert w.clone().scale.shape == (4, 1)
    half = w.half()
    assert (half.dtype, half.qdata.dtype, half.scale.dtype) == (torch.float16, torch.int8, torch.float16)


def test_a_class_that_says_its_value_is_not_filled_inner_by_inner():
    for fn in (torch.ones_like, torch.zeros_like, lambda w: w.new_ones(2), torch.rand_like):
        with pytest.raises(DispatchError, match=r"@Scaled\.implements"):
            fn(scaled())


def test_a_rule_of_the_class_comes_first():
    class Ruled(Scaled):
        pass

    Ruled.implements(aten.t)(lambda func, w: Ruled(func(w.qdata), w.scale.t()))
    w = Ruled(torch.ones(4, 3, dtype=torch.int8), torch.rand(4, 1))
    assert w.t().scale.shape == (1, 4)


def test_an_outer_size_that_does_not_follow_is_refused():
    x = Repeated(torch.ones(4, 3))
    with pytest.raises(
        DispatchError, match=r"the result is a Repeated of size \(4, 3\).*'row' has size \(3, 4\)"
    ):
        x.t()


def test_coverage_tells_views_from_errors():
    steps = subclasses.coverage(Located).steps
    assert steps["aten.transpose.int"] == steps["aten.zeros_like.default"] == "views"
    assert steps["aten.t_.default"] == steps["aten.view.default"] == "views"
    assert steps["aten.exp.default"] == steps["aten.as_strided_.default"] == "error"
    assert steps["aten.clone.default"] == "structure"
    assert subclasses.coverage(Scaled).steps["aten.zeros_like.default"] == "error"
    assert "views" in str(subclasses.coverage(Located))


def test_no_op_that_computes_counts_as_a_view():
    """Whatever maps gives the same elements: ops with a pointwise, reduction or random meaning never do."""
    for name in (
        "add",
        "sum",
        "flip",
        "index_select",
        "slice_scatter",
        "view_as_real",
        "set_",
        "repeat",
        "relu",
    ):
        packet = getattr(aten, name)
        assert not any(is_view(getattr(packet, o)) for o in packet.overloads()), name


def test_cotangents_are_added():
    x = located(grad=True)
    y = x.view(2, 6).unwrap("mean").sum() + x.t().unwrap("deviation").sum()
    y.backward()
    assert type(x.grad) is Located.Cotangent
    assert torch.equal(x.grad.mean, torch.ones(4, 3))
    assert torch.equal(x.grad.deviation, torch.ones(4, 3))


# ---- further dims ------------------------------------------------------------------------------------------


class Poses(TensorSubclass, fallback="map"):
    """A batch of rotations and translations; the value has the size of the batch."""

    turn: Tensor = inner(shape="... 3 3")
    shift: Tensor = inner(shape="... 3")

    @staticmethod
    def outer(shift):
        return Outer(shift.shape[:-1])


def poses():
    return Poses(torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3))


# A call of the value, and the same with dims that are counted from the front.
OF_DIMS = {
    "flip": (lambda x: x.flip(-1), lambda t: t.flip(1)),
    "flip of two": (lambda x: x.flip([-2, -1]), lambda t: t.flip([0, 1])),
    "roll": (lambda x: x.roll(1, -1), lambda t: t.roll(1, 1)),
    "sum": (lambda x: x.sum(-1), lambda t: t.sum(1)),
    "sum of two": (lambda x: x.sum((-1, 0)), lambda t: t.sum((0, 1))),
    "mean with keepdim": (lambda x: x.mean(-2, keepdim=True), lambda t: t.mean(0, keepdim=True)),
    "cumsum": (lambda x: x.cumsum(-1), lambda t: t.cumsum(1)),
    "select": (lambda x: x.select(-1, 0), lambda t: t.select(1, 0)),
    "index": (lambda x: x[..., 0], lambda t: t[:, 0]),
    "narrow": (lambda x: x.narrow(-1, 1, 2), lambda t: t.narrow(1, 1, 2)),
    "mT": (lambda x: x.mT, lambda t: t.transpose(0, 1)),
    "transpose": (lambda x: x.transpose(-2, -1), lambda t: t.transpose(0, 1)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda t: t.unsqueeze(2)),
    "unsqueeze_": (lambda x: x.clone().unsqueeze_(-1), lambda t: t.unsqueeze(2)),
    "stack": (lambda x: torch.stack([x, x], -1), lambda t: torch.stack([t, t], 2)),
    "cat": (lambda x: torch.cat([x, x], -1), lambda t: torch.cat([t, t], 1)),
    "split": (lambda x: x.split(2, -1)[1], lambda t: t.split(2, 1)[1]),
    "unbind": (lambda x: x.unbind(-1)[3], lambda t: t.unbind(1)[3]),
    "sort by default": (lambda x: x.sort()[0], lambda t: t.sort(1)[0]),
    "softmax": (lambda x: x.softmax(-1), lambda t: t.softmax(1)),
    "index_select": (lambda x: x.index_select(-1, torch.tensor([2])), lambda t: t[:, 2:3]),
    "reshape": (lambda x: x.reshape(-1), lambda t: t.flatten(0, 1)),
    "view": (lambda x: x.view(4, 2), lambda t: t.view(4, 2, *t.shape[2:])),
    "expand": (lambda x: x[:1].expand(5, 4), lambda t: t[:1].expand(5, *t.shape[1:])),
    "repeat": (lambda x: x.repeat(2, 1), lambda t: torch.cat([t, t])),
    "a product": (lambda x: x * 2, lambda t: t * 2),
}


# Results that are views of an argument, which torch.compile remakes; newer releases take x.mT for one too.
REMADE = {*"select index narrow transpose unsqueeze split unbind reshape view expand".split()}
if torch.__version__.split(".")[:2] != ["2", "13"]:
    REMADE.add("mT")


@pytest.mark.sweep(18)
@pytest.mark.parametrize("door", ["eager", "aot_eager", "desugar"])
@pytest.mark.parametrize("name", OF_DIMS)
def test_dims_are_those_of_the_value(name, door):
    run, of_inner = OF_DIMS[name]
    compiled = {
        "eager": lambda f: f,
        "aot_eager": lambda f: torch.compile(f, backend="aot_eager"),
        "desugar": lambda f: desugar.compile(f, backend="eager"),
    }[door](lambda x: run(x))
    x = poses()
    if door == "aot_eager" and name in REMADE:  # by strides, and `outer` gives none
        with pytest.raises(
            DispatchError, match=r"compile it with desugar\.compile.*has to give those of views"
        ):
            compiled(x)
        return
    y = compiled(x)
    assert type(y) is Poses
    torch.testing.assert_close(y.turn, of_inner(x.turn))
    torch.testing.assert_close(y.shift, of_inner(x.shift))


@pytest.mark.parametrize("name", [n for n in OF_DIMS if n not in ("split", "unbind")])
def test_gradients_of_dims(name):
    run, of_inner = OF_DIMS[name]
    turn, shift = (torch.randn(2, 4, *size, requires_grad=True) for size in ((3, 3), (3,)))
    y = run(Poses(turn, shift))
    inner_tensors = y.unwrap()
    found = torch.autograd.grad([t.sin().sum() for t in inner_tensors], (turn, shift))
    expected = torch.autograd.grad([of_inner(t).sin().sum() for t in (turn, shift)], (turn, shift))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum(),
        lambda x: x.mean(),
        lambda x: x.diagonal(),
        lambda x: x.tril(),
        lambda x: x.amax(),
    ],
)
def test_what_would_change_further_dims_is_refused(run):
    with pytest.raises(DispatchError, match=r"further dims of 'turn'.*Name dims of the value.*write a rule"):
        run(poses())


class Forms(TensorSubclass, fallback="map"):
    """Quadratic forms by their centre and matrix; the size is that of a batch of them."""

    centre: Tensor = inner(differentiable=True)
    matrix: Tensor = inner(differentiable=True)
    leaves_out: bool = static(default=True)

    @staticmethod
    def outer(centre, leaves_out):
        return Outer(centre.shape[:-1] if leaves_out else (centre.shape[0],))


PICKS = {
    "list": lambda x: x[[0, 2]],
    "mask": lambda x: x[torch.tensor([True, False, True, True])],
    "index": lambda x: x[torch.tensor([[0, 1], [3, 3]])],
    "none": lambda x: x[torch.zeros(4, dtype=torch.bool)],
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pick", PICKS)
def test_an_index_picks_rows_with_their_further_dims(pick, mode):
    centre, matrix = torch.rand(4, 2, requires_grad=True), torch.rand(4, 2, 2, requires_grad=True)
    out = MODES[mode](lambda x: PICKS[pick](x))(Forms(centre, matrix))
    assert type(out) is Forms and out.shape == PICKS[pick](torch.rand(4)).shape
    (out.centre.sum() + (out.matrix**2).sum()).backward()
    torch.testing.assert_close(out.matrix.detach(), PICKS[pick](matrix).detach())
    expected = torch.autograd.grad((PICKS[pick](matrix) ** 2).sum(), matrix)[0]
    torch.testing.assert_close(matrix.grad, expected)


def test_an_outer_that_shows_further_dims_is_named():
    x = Forms(torch.rand(4, 2), torch.rand(4, 2, 2), leaves_out=False)
    told = r"Forms\.outer gives size \(2,\) .*Let outer take those alone, as in Outer\(centre\.shape\[:-1\]\)"
    for call in (lambda x: x[1], lambda x: x.sum(dim=0), lambda x: x.unbind()):
        with pytest.raises(DispatchError, match=told):
            call(x)
    x = Forms(torch.rand(4, 2), torch.rand(4, 2, 2))
    assert x[1].shape == x.sum(dim=0).shape == () and len(x.unbind()) == 4


def test_operands_that_share_memory_are_no_matter_of_sizes():
    x = Forms(torch.rand(4, 2), torch.rand(4, 2, 2))
    with pytest.raises(RuntimeError, match=r"^unsupported operation: .*Please clone\(\) the tensor"):
        x[torch.tensor([True, False, False, True])] = x[1:2]


# ---- inner tensors of other sizes --------------------------------------------------------------------------


class Parts(TensorSubclass, fallback="map"):
    """Two inner tensors of any sizes; the value has that of the first."""

    first: Tensor = inner()
    second: Tensor = inner()


class Wide(TensorSubclass, fallback="map"):
    """A matrix and an offset, shown as one matrix with a column more."""

    matrix: Tensor = inner(shape="... 2 2")
    offset: Tensor = inner(shape="... 2")

    @staticmethod
    def outer(matrix):
        return Outer((*matrix.shape[:-1], matrix.shape[-1] + 1))


OTHER_SIZES = {
    "a shift": lambda: Parts(torch.rand(3, 3), torch.rand(3)),
    "a coarse image": lambda: Parts(torch.rand(4, 4), torch.rand(2, 2)),
    "a scale": lambda: Parts(torch.rand(4, 4), torch.rand(4, 1)),
    "a column more": lambda: Wide(torch.rand(3, 2, 2), torch.rand(3, 2)),
}
NAMING = {
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "var": lambda x: x.var(0),
    "softmax": lambda x: x.softmax(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1),
    "reshape": lambda x: x.reshape(-1),
    "cat": lambda x: torch.cat([x, x]),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("door", ["eager", "desugar"])
@pytest.mark.parametrize("op", NAMING)
@pytest.mark.parametrize("kind", OTHER_SIZES)
def test_what_names_dims_or_sizes_is_refused_on_an_inner_tensor_of_another_size(kind, op, door):
    """The same dims mean other elements there: a sum over rows, the half of an image, a gradient by another size."""
    run = NAMING[op]
    call = run if door == "eager" else desugar.compile(lambda x: run(x), backend="eager")
    words = (
        r"has other elements where the op names dims, sizes or all.*write a rule: @(Parts|Wide)\.implements"
    )
    if kind == "a scale" and op == "interpolate":
        words = "has other elements|upsample"
    with pytest.raises(DispatchError if door == "eager" else Exception, match=words):
        call(OTHER_SIZES[kind]())


@pytest.mark.parametrize("kind", OTHER_SIZES)
def test_what_names_none_maps_over_inner_tensors_of_another_size(kind):
    for fn in (
        lambda x: x * 2,
        lambda x: (x - 1).exp(),
        torch.zeros_like,
        torch.clone,
        lambda x: x + x,
        lambda x: x.double(),
    ):
        x = OTHER_SIZES[kind]()
        for got, held in zip(fn(x).unwrap(), x.unwrap(), strict=True):
            torch.testing.assert_close(got, fn(held))


def test_views_move_a_dim_of_size_one():
    x = Parts(torch.rand(4, 3), torch.rand(4, 1))
    for fn in (
        lambda t: t.t(),
        lambda t: t[1:3],
        lambda t: t[2],
        lambda t: t.unsqueeze(0),
        lambda t: t.movedim(0, -1),
    ):
        for got, held in zip(fn(x).unwrap(), x.unwrap(), strict=True):
            assert torch.equal(got, fn(held))


PLAIN = {
    "a coarse image": (lambda: Parts(torch.rand(2, 2, 2), torch.rand(2, 1, 1)), torch.rand(2, 2, 2)),
    "a scale": (lambda: Parts(torch.rand(4, 3), torch.rand(4, 1)), torch.rand(3)),
    "further dims": (lambda: Parts(torch.rand(3), torch.rand(3, 3)), torch.rand(3)),
    "a column more": (lambda: Wide(torch.rand(3, 2, 2), torch.rand(3, 2)), torch.rand(2)),
}
WITH_PLAIN = {
    "add": lambda x, t: x + t,
    "from the left": lambda x, t: t * x,
    "where": lambda x, t: torch.where(t > 0.5, x, x),
    "masked_fill": lambda x, t: x.masked_fill(t > 0.5, 0),
    "addcmul": lambda x, t: torch.addcmul(x, x, t),
    "in place": lambda x, t: x.mul_(t),
}


@pytest.mark.parametrize("op", WITH_PLAIN)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_operand_has_no_elements_of_an_inner_tensor_of_another_size(kind, op):
    make, plain = PLAIN[kind]
    with pytest.raises(DispatchError, match=r"has other elements than a plain operand.*write a rule"):
        WITH_PLAIN[op](make(), plain)


def test_a_plain_operand_that_adds_no_elements():
    x = Parts(torch.rand(4, 3), torch.rand(4, 1))
    for plain in (torch.rand(4, 1), torch.rand(1), torch.rand(1, 1), torch.tensor(2.0)):
        for got, held in zip((x * plain).unwrap(), x.unwrap(), strict=True):
            assert torch.equal(got, held * plain)
    x = Parts(torch.rand(4, 3), torch.rand(3))
    assert torch.equal((x * torch.ones(3)).second, x.second)


def test_further_dims_without_an_outer():
    x = Parts(torch.rand(4), torch.rand(4, 3, 3))
    assert x.sum(-1).second.shape == (3, 3)
    for run in (
        lambda x: x.sum(),
        lambda x: x.roll(1),
        lambda x: x.unfold(0, 2, 1),
        lambda x: F.mse_loss(x, torch.ones(4)),
    ):
        with pytest.raises(DispatchError, match=r"further dims of 'second'|has other elements than a plain"):
            run(x)
    assert torch.equal(x.roll(1, 0).second, x.second.roll(1, 0))


# ---- views that torch.compile remakes ----------------------------------------------------------------------


class Halves(TensorSubclass):
    """Numbers, each stored twice as large, with views by rules and an `outer` that gives sizes alone, or strides."""

    double: Tensor = inner()
    knows: bool = static(default=True)

    @staticmethod
    def outer(double, knows):
        if knows:
            return Outer(double.shape, stride=double.stride(), storage_offset=double.storage_offset())
        return Outer(double.shape)


@Halves.implements(aten.slice.Tensor)
def _(func, x, *args, **kwargs):
    return Halves(func(x.double, *args, **kwargs), knows=x.knows)


@Halves.implements(aten.as_strided.default)
def _(func, x, *args, **kwargs):
    return Halves(func(x.double, *args, **kwargs), knows=x.knows)


def test_a_view_with_other_strides_than_its_outer_gives_is_refused_where_it_is_remade():
    def tail(x):
        return x[2:]

    def stock(**options):
        return torch.compile(tail, backend="aot_eager", **options)

    double = torch.arange(6.0)
    assert stock()(Halves(double)).double.tolist() == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(
        Exception, match=r"result has stride \(1,\) and offset 0, and the view has .* offset 2.*outer give"
    ):
        stock(fullgraph=True)(Halves(double, knows=False))
    for f in (tail, stock(), desugar.compile(tail, backend="eager")):
        assert f(Halves(double, knows=False)).double.tolist() == [2.0, 3.0, 4.0, 5.0]


class Diagonal(TensorSubclass, fallback="materialize"):
    """A diagonal matrix, which is its own transpose."""

    held: Tensor = inner()

    def materialize(self):
        return self.held.diag()

    @staticmethod
    def outer(held):
        return Outer((held.shape[0], held.shape[0]))


@Diagonal.implements(aten.transpose.int)
def _(func, x, *args):
    return Diagonal(aten.alias(x.held))


def test_the_derivative_of_a_view_that_torch_compile_remade():
    def turned(x):
        return x.transpose(0, 1)

    def gradient(f):
        t = torch.randn(3, requires_grad=True)
        return torch.autograd.grad(f(Diagonal(t)).materialize().sum(), t)[0].tolist()

    assert gradient(turned) == [1.0, 1.0, 1.0]
    with pytest.raises(
        DispatchError,
        match=r"none for aten.as_strided.default, with which torch.compile .*compile it with desugar\.compile",
    ):
        gradient(torch.compile(turned, backend="aot_eager"))
    assert gradient(desugar.compile(turned, backend="eager")) == [1.0, 1.0, 1.0]
    with pytest.raises(
        Exception, match=r"return x\.materialize\(\), or compile the function with desugar\.compile"
    ):
        gradient(torch.compile(lambda x: turned(x).clone(), backend="aot_eager"))
    assert gradient(desugar.compile(lambda x: turned(x).clone(), backend="eager")) == [1.0, 1.0, 1.0]


# ---- a view of its own size --------------------------------------------------------------------------------


class Doubled(TensorSubclass, fallback="materialize"):
    held: Tensor = inner(differentiable=True)

    def materialize(self):
        return 2 * self.held


class Alone(TensorSubclass):
    """Any op is an error."""

    held: Tensor = inner(differentiable=True)


@pytest.mark.parametrize("cls", [Doubled, Alone])
@pytest.mark.parametrize("door", ["eager", "aot_eager", "desugar"])
def test_a_view_of_its_own_size_is_the_value(cls, door):
    compiled = {
        "eager": lambda f: f,
        "aot_eager": lambda f: torch.compile(f, backend="aot_eager", dynamic=True),
        "desugar": lambda f: desugar.compile(f, backend="eager", dynamic=True),
    }[door](lambda x: 3 * x.view(x.shape).held)
    for n in (2, 3, 5):
        held = torch.ones(n, requires_grad=True)
        y = compiled(cls(held))
        assert y.tolist() == [3.0] * n
        assert torch.autograd.grad(y.sum(), held)[0].tolist() == [3.0] * n


@pytest.mark.parametrize("cls", [Doubled, Alone])
def test_hooks_of_modules_leave_values_as_they_are(cls):
    class Making(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, k):
            return cls(self.weight * k)

    module, seen = Making(), []
    module.register_full_backward_hook(lambda m, given, out: seen.append(len(given)))
    y = module(torch.full((3,), 2.0, requires_grad=True))
    assert type(y) is cls
    y.held.sum().backward()
    assert seen == [1] and module.weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_view_of_another_size_still_materializes():
    x = Doubled(torch.ones(2, 3))
    assert type(x.view(6)) is Tensor and type(x.view(-1, 3)) is Tensor
    y = x.view(2, 3)
    assert type(y) is Doubled and y.held.data_ptr() == x.held.data_ptr()
