"""``fallback="views"`` maps views or refuses them; a view of an inner tensor is never silently wrong."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import subclasses
from subclasses import DispatchError, Outer, inner, static
from subclasses.dispatch.mapping import is_view
from tests.doors import DOORS, by_desugar, by_stock, eager
from tests.modules import Held
from tests.subclasses.autograd.judge import agree, agreeing, numbers
from tests.subclasses.subjects import assert_same, declare
from tests.tables import giving, raising

aten = torch.ops.aten
three_doors = pytest.mark.parametrize("door", ["eager", "stock", "desugar"])


# A mean and a deviation for each entry, which have no meaning under a nonlinear op.
Located = declare(
    name="Located",
    keywords={"fallback": "views"},
    mean=inner(),
    deviation=inner(differentiable=True),
    unit=static(default="m"),
)
# Quantized rows with a scale for each.
Scaled = declare(
    name="Scaled",
    keywords={"fallback": "views", "dtype_from": "scale"},
    qdata=inner(dtype=torch.int8),
    scale=inner(),
    materialize=lambda self: self.qdata * self.scale,
)
# An outer size that equals the inner one before a view, and not after it.
Repeated = declare(
    name="Repeated",
    keywords={"fallback": "views"},
    row=inner(),
    outer=staticmethod(lambda row: Outer((4, 3))),
)


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


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_a_view_of_each_inner_tensor(name):
    x, fn = located(), VIEWS[name]
    y = fn(x)
    assert type(y) is Located and y.unit == "m" and y.shape == fn(torch.empty(4, 3)).shape
    if name != "reshape":
        assert y._is_view()
        assert y.mean.untyped_storage().data_ptr() == x.mean.untyped_storage().data_ptr()


# The derivatives join the gradients of several results.
@pytest.mark.sweep(28)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_and_its_gradient_in_every_way(name, door):
    fn, x = VIEWS[name], located()
    run = DOORS[door](fn, fullgraph=True)
    assert_same(run(x), fn(x))
    # Stock decomposes the derivative of unfold into an op that writes to places of each inner tensor.
    refused = pytest.raises(DispatchError, match=r"has no rule for aten\.index_add_")
    with refused if (name, door) == ("unfold", "stock") else contextlib.nullcontext():
        agree(
            lambda mean, deviation: run(Located(mean, deviation)).unwrap(),
            lambda mean, deviation: (fn(mean), fn(deviation)),
            numbers((4, 3), (4, 3)),
        )


test_a_gradient_that_reaches_one_inner_tensor = agreeing(
    {
        "the first": (
            lambda mean, deviation: Located(mean, deviation).t().unwrap("mean").square(),
            lambda mean, deviation: mean.t().square(),
            [(4, 3), (4, 3)],
        )
    }
)


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
    out, expected = fn(x), fn(plain)
    assert out.shape == expected.shape and torch.equal(out.mean, expected)
    assert (x.shape, x.stride()) == (plain.shape, plain.stride())


def test_a_write_to_a_view_reaches_the_base():
    x, row = located(), located(3)
    x[1].copy_(row)
    x[0] = row
    for i in range(2):
        assert_same(x[i].clone(), row)


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
    assert x.to("meta").deviation.is_meta and x.new_empty(7).mean.shape == (7,)
    for make in (torch.zeros_like, lambda x: x.new_zeros(2, 5), lambda x: torch.full_like(x, 3.0)):
        assert_same(make(x), Located(make(x.mean), make(x.deviation)))


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


test_every_other_op_names_itself_and_the_rule = raising(
    {
        op: (
            lambda call=call: call(located()),
            rf"Located has no rule for {op}\(.*@Located\.implements\(torch\.ops\.{op}\)",
        )
        for op, call in REFUSED.items()
    }
)
test_a_refusal_under_a_compiler_is_the_same = raising(
    {
        f"{op}, {door}": (
            lambda op=op, door=door: DOORS[door](REFUSED[op])(located()),
            Exception,
            r"@Located\.implements",
        )
        for op in ("aten.exp.default", "aten.add.Tensor")
        for door in ("stock", "desugar")
    }
)


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


Ruled = declare(Scaled, rules={aten.t: lambda func, w: Ruled(func(w.qdata), w.scale.t())})
test_what_maps_whatever_the_sizes = giving(
    {
        "a clone": (lambda: scaled().clone().scale.shape, (4, 1)),
        "a dtype": (
            lambda: [t.dtype for t in (scaled().half(), *scaled().half().unwrap())],
            [torch.float16, torch.int8, torch.float16],
        ),
        "a rule of the class": (
            lambda: Ruled(torch.ones(4, 3, dtype=torch.int8), torch.rand(4, 1)).t().scale.shape,
            (1, 4),
        ),
    }
)
test_a_class_that_says_its_value_is_not_filled_inner_by_inner = raising(
    [
        (lambda fn=fn: fn(scaled()), r"@Scaled\.implements")
        for fn in (torch.ones_like, torch.zeros_like, lambda w: w.new_ones(2), torch.rand_like)
    ]
)


test_an_outer_size_that_does_not_follow_is_refused = raising(
    [
        (
            lambda: Repeated(torch.ones(4, 3)).t(),
            r"the result is a Repeated of size \(4, 3\).*'row' has size \(3, 4\)",
        )
    ]
)

STEPS = {
    **dict.fromkeys(["aten.transpose.int", "aten.zeros_like.default"], "views"),
    **dict.fromkeys(["aten.t_.default", "aten.view.default"], "views"),
    **dict.fromkeys(["aten.exp.default", "aten.as_strided_.default"], "error"),
    "aten.clone.default": "inners",
}


def test_coverage_tells_views_from_errors():
    found = subclasses.coverage(Located)
    assert {op: found.steps[op] for op in STEPS} == STEPS and "views" in str(found)
    assert subclasses.coverage(Scaled).steps["aten.zeros_like.default"] == "error"


def test_no_op_that_computes_counts_as_a_view():
    """Whatever maps gives the same elements: ops with a pointwise, reduction or random meaning never do."""
    for name in "add sum flip index_select slice_scatter view_as_real set_ repeat relu".split():
        packet = getattr(aten, name)
        assert not any(is_view(getattr(packet, o)) for o in packet.overloads()), name


def test_cotangents_are_added():
    x = located(grad=True)
    (x.view(2, 6).unwrap("mean").sum() + x.t().unwrap("deviation").sum()).backward()
    assert_same(x.grad, x.cotangent(torch.ones(4, 3), torch.ones(4, 3)))


# ---- further dims ------------------------------------------------------------------------------------------


# A batch of rotations and translations; the value has the size of the batch.
Poses = declare(
    keywords={"fallback": "map"},
    turn=inner(shape="... 3 3"),
    shift=inner(shape="... 3"),
    outer=staticmethod(lambda shift: Outer(shift.shape[:-1])),
)


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


@pytest.mark.sweep(36)
@three_doors
@pytest.mark.parametrize("name", OF_DIMS)
def test_dims_are_those_of_the_value(name, door):
    run, of_inner = OF_DIMS[name]
    compiled, x = DOORS[door](run), poses()
    if door == "stock" and name in REMADE:  # by strides, and `outer` gives none
        with pytest.raises(
            DispatchError, match=r"compile it with desugar\.compile.*must return them for views"
        ):
            compiled(x)
        return
    y = compiled(x)
    assert type(y) is Poses
    torch.testing.assert_close(y.unwrap(), (of_inner(x.turn), of_inner(x.shift)))


test_gradients_of_dims = agreeing(
    {
        name: (
            lambda turn, shift, run=run: run(Poses(turn, shift)).unwrap(),
            lambda turn, shift, plain=plain: (plain(turn), plain(shift)),
            [(2, 4, 3, 3), (2, 4, 3)],
        )
        for name, (run, plain) in OF_DIMS.items()
        if name not in ("split", "unbind")
    },
    {"eager": eager},
)
test_what_would_change_further_dims_is_refused = raising(
    [
        (
            lambda run=run: run(poses()),
            r"further dims of 'turn'.*Name dims of the value.*write a rule",
        )
        for run in (
            lambda x: x.sum(),
            lambda x: x.mean(),
            lambda x: x.diagonal(),
            lambda x: x.tril(),
            lambda x: x.amax(),
        )
    ]
)


# Quadratic forms by their centre and matrix; the size is the size of a batch of them.
Forms = declare(
    name="Forms",
    keywords={"fallback": "map"},
    centre=inner(differentiable=True),
    matrix=inner(differentiable=True),
    leaves_out=static(default=True),
    outer=staticmethod(
        lambda centre, leaves_out: Outer(centre.shape[:-1] if leaves_out else (centre.shape[0],))
    ),
)

PICKS = {
    "list": lambda x: x[[0, 2]],
    "mask": lambda x: x[torch.tensor([True, False, True, True])],
    "index": lambda x: x[torch.tensor([[0, 1], [3, 3]])],
    "none": lambda x: x[torch.zeros(4, dtype=torch.bool)],
}


test_an_index_picks_rows_with_their_further_dims = agreeing(
    {
        name: (
            lambda centre, matrix, pick=pick: pick(Forms(centre, matrix)).unwrap(),
            lambda centre, matrix, pick=pick: (pick(centre), pick(matrix)),
            [(4, 2), (4, 2, 2)],
        )
        for name, pick in PICKS.items()
    }
)


def forms(**how):
    return Forms(torch.rand(4, 2), torch.rand(4, 2, 2), **how)


test_an_outer_that_shows_further_dims_is_named = raising(
    [
        (
            lambda call=call: call(forms(leaves_out=False)),
            r"Forms\.outer gives size \(2,\) .*Let outer take those alone, as in Outer\(centre\.shape\[:-1\]\)",
        )
        for call in (lambda x: x[1], lambda x: x.sum(dim=0), lambda x: x.unbind())
    ]
)


def test_an_outer_that_leaves_them_out():
    x = forms()
    assert x[1].shape == x.sum(dim=0).shape == () and len(x.unbind()) == 4
    assert [pick(x).shape for pick in PICKS.values()] == [(2,), (3,), (2, 2), (0,)]


def test_operands_that_share_memory_are_no_matter_of_sizes():
    x = forms()
    with pytest.raises(RuntimeError, match=r"^unsupported operation: .*Please clone\(\) the tensor"):
        x[torch.tensor([True, False, False, True])] = x[1:2]


# ---- inner tensors of other sizes --------------------------------------------------------------------------


# Two inner tensors of any sizes; the value has the size of the first.
Parts = declare(name="Parts", keywords={"fallback": "map"}, first=inner(), second=inner())


# A matrix and an offset, shown as one matrix with a column more.
Wide = declare(
    name="Wide",
    keywords={"fallback": "map"},
    matrix=inner(shape="... 2 2"),
    offset=inner(shape="... 2"),
    outer=staticmethod(lambda matrix: Outer((*matrix.shape[:-1], matrix.shape[-1] + 1))),
)

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


# The same dims mean other elements there: a sum over rows, the half of an image, a gradient by another size.
test_what_names_dims_or_sizes_is_refused_on_an_inner_tensor_of_another_size = pytest.mark.sweep(8)(
    raising(
        {
            f"{kind}, {op}, {door}": (
                lambda make=make, op=op, door=door: DOORS[door](NAMING[op])(make()),
                DispatchError if door == "eager" else Exception,
                r"has other elements where the op names dims, sizes or all.*write a rule: @(Parts|Wide)\.implements"
                + ("|has other elements|upsample" if (kind, op) == ("a scale", "interpolate") else ""),
            )
            for kind, make in OTHER_SIZES.items()
            for op in NAMING
            for door in ("eager", "desugar")
        }
    )
)


def check_mapped(fn, x):
    torch.testing.assert_close(fn(x).unwrap(), tuple(map(fn, x.unwrap())))


NAMING_NONE = {
    "product": lambda x: x * 2,
    "exp": lambda x: (x - 1).exp(),
    "zeros": torch.zeros_like,
    "clone": torch.clone,
    "sum": lambda x: x + x,
    "double": lambda x: x.double(),
}


@pytest.mark.parametrize("op", NAMING_NONE)
@pytest.mark.parametrize("kind", OTHER_SIZES)
def test_what_names_none_maps_over_inner_tensors_of_another_size(kind, op):
    check_mapped(NAMING_NONE[op], OTHER_SIZES[kind]())


@pytest.mark.parametrize(
    "fn",
    [
        lambda t: t.t(),
        lambda t: t[1:3],
        lambda t: t[2],
        lambda t: t.unsqueeze(0),
        lambda t: t.movedim(0, -1),
        lambda t: t * torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        lambda t: t * torch.full((1,), 2.0),
        lambda t: t * torch.full((1, 1), 2.0),
        lambda t: t * torch.tensor(2.0),
    ],
)
def test_a_dim_of_size_one_is_moved_and_takes_plain_operands_that_add_no_elements(fn):
    check_mapped(fn, Parts(torch.rand(4, 3), torch.rand(4, 1)))


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


test_a_plain_operand_has_no_elements_of_an_inner_tensor_of_another_size = raising(
    {
        f"{kind}, {op}": (
            lambda call=call, make=make, plain=plain: call(make(), plain),
            r"has other elements than a plain operand.*write a rule",
        )
        for kind, (make, plain) in PLAIN.items()
        for op, call in WITH_PLAIN.items()
    }
)


# A rotation for each number, without an `outer`.
ROTATED = Parts(torch.rand(4), torch.rand(4, 3, 3))
test_further_dims_without_an_outer = raising(
    [
        (
            lambda run=run: run(ROTATED),
            r"further dims of 'second'|has other elements than a plain",
        )
        for run in (
            lambda x: x.sum(),
            lambda x: x.roll(1),
            lambda x: x.unfold(0, 2, 1),
            lambda x: F.mse_loss(x, torch.ones(4)),
        )
    ]
)


def test_what_names_dims_of_the_value():
    assert ROTATED.sum(-1).second.shape == (3, 3)
    assert torch.equal(ROTATED.roll(1, 0).second, ROTATED.second.roll(1, 0))
    check_mapped(lambda t: t * torch.ones(3), Parts(torch.rand(4, 3), torch.rand(3)))


# ---- views that torch.compile remakes ----------------------------------------------------------------------


def sizes_alone_or_strides(double, knows):
    if knows:
        return Outer(double.shape, stride=double.stride(), storage_offset=double.storage_offset())
    return Outer(double.shape)


# Numbers, each stored twice as large, with views by rules.
Halves = declare(
    double=inner(),
    knows=static(default=True),
    outer=staticmethod(sizes_alone_or_strides),
    rules=dict.fromkeys(
        [aten.slice.Tensor, aten.as_strided.default],
        lambda func, x, *args, **kwargs: Halves(func(x.double, *args, **kwargs), knows=x.knows),
    ),
)


def test_a_view_with_other_strides_than_its_outer_gives_is_refused_where_it_is_remade():
    def tail(x):
        return x[2:]

    double = torch.arange(6.0)
    assert by_stock(tail)(Halves(double)).double.tolist() == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(
        Exception, match=r"result has stride \(1,\) and offset 0, and the view has .* offset 2.*outer give"
    ):
        by_stock(tail, fullgraph=True)(Halves(double, knows=False))
    for f in (tail, by_stock(tail), by_desugar(tail)):
        assert f(Halves(double, knows=False)).double.tolist() == [2.0, 3.0, 4.0, 5.0]


# A diagonal matrix, which is its own transpose.
Diagonal = declare(
    keywords={"fallback": "materialize"},
    materialize=lambda self: self.held.diag(),
    outer=staticmethod(lambda held: Outer((held.shape[0], held.shape[0]))),
    rules={aten.transpose.int: lambda func, x, *args: Diagonal(aten.alias(x.held))},
)
TURNED = {
    "a view": (
        lambda x: x.transpose(0, 1),
        r"none for aten.as_strided.default, with which torch.compile .*compile it with desugar\.compile",
    ),
    "a copy": (
        lambda x: x.transpose(0, 1).clone(),
        r"return x\.materialize\(\), or compile the function with desugar\.compile",
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_the_derivative_of_a_view_that_torch_compile_remade(name):
    turned, words = TURNED[name]

    def gradient(f):
        t = torch.randn(3, requires_grad=True)
        return torch.autograd.grad(f(Diagonal(t)).materialize().sum(), t)[0].tolist()

    assert gradient(turned) == gradient(by_desugar(turned)) == [1.0, 1.0, 1.0]
    with pytest.raises(Exception, match=words):
        gradient(by_stock(turned))


# ---- a view of its own size --------------------------------------------------------------------------------


Doubled = declare(
    keywords={"fallback": "materialize"},
    held=inner(differentiable=True),
    materialize=lambda self: 2 * self.held,
)
Alone = declare(held=inner(differentiable=True))  # any op is an error


@pytest.mark.parametrize("cls", [Doubled, Alone])
@three_doors
def test_a_view_of_its_own_size_is_the_value(cls, door):
    compiled = DOORS[door](lambda x: 3 * x.view(x.shape).held, dynamic=True)
    for n in (2, 3, 5):
        agree(lambda held: compiled(cls(held)), lambda held: 3 * held, numbers(n))


@pytest.mark.parametrize("cls", [Doubled, Alone])
def test_hooks_of_modules_leave_values_as_they_are(cls):
    class Making(Held):
        def forward(self, k):
            return cls(self.weight * k)

    module, seen = Making(weight=torch.nn.Parameter(torch.ones(3))), []
    module.register_full_backward_hook(lambda m, given, out: seen.append(len(given)))
    y = module(torch.full((3,), 2.0, requires_grad=True))
    assert type(y) is cls
    y.held.sum().backward()
    assert seen == [1] and module.weight.grad.tolist() == [2.0, 2.0, 2.0]


HELD = torch.ones(2, 3)
test_a_view_of_another_size_still_materializes = giving(
    {
        "another size": (lambda: type(Doubled(HELD).view(6)), Tensor),
        "another size with -1": (lambda: type(Doubled(HELD).view(-1, 3)), Tensor),
        "its own size": (lambda: Doubled(HELD).view(2, 3).held.data_ptr(), HELD.data_ptr()),
    }
)
