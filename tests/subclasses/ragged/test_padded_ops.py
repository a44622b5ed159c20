"""The rules of padded tensors, each with poisoned padding and a loop over the rows as judge."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from subclasses.ragged import PaddedTensor
from tests.subclasses.ragged.padded_judge import PLACES, WAYS, check_padded, check_parts, make_table
from tests.subclasses.ragged.test_pointwise import BINARY, DENSE, UNARY, on_row

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

ways = pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)


def random(*shape, **kwargs):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True, **kwargs)


# ---- pointwise -------------------------------------------------------------------------------------------------


@pytest.mark.sweep(18)
@pytest.mark.parametrize("f", UNARY, ids=lambda f: f.__name__)
@ways
def test_unary(f, way):
    check_padded(make_table(), f, lambda row, _: f(row), way=way)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("f", BINARY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("places", PLACES)
def test_two_padded(f, places):
    check_padded(make_table(places), lambda x: f(x, x * 2 + 1), lambda row, _: f(row, row * 2 + 1))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dense", DENSE)
@ways
def test_dense_operand(dense, way):
    shape, of_row = DENSE[dense]
    table, p = make_table(width=5), random(*shape)
    check_padded(
        table,
        lambda x, p: p * (x * p).tanh() + torch.where(x > 0, p, x),
        lambda row, i, p: on_row(row, of_row(p, i, len(row))),
        [p],
        way,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("wide", list(itertools.product([True, False], repeat=4)), ids=str)
@pytest.mark.parametrize("places", ["[T, B]", "[D, B, T]"])
def test_dense_operand_beside_rows_elsewhere(places, wide):
    table = make_table(places, entry=(2, 3))
    full = table.leaf.shape
    p = random(*(n if w else 1 for n, w in zip(full, wide, strict=True)))
    check_padded(table, lambda x, p: x * p, lambda row, i, p: row * table.slices(p.expand(full))[i], [p])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 3), st.data())
def test_any_rows_beside_any_broadcast(lengths, width, features, data):
    lengths = [min(n, width) for n in lengths]
    b = len(lengths)
    shape = [data.draw(st.sampled_from([1, n])) for n in (b, width, features)][data.draw(st.integers(0, 3)) :]
    table, p = make_table(lengths=lengths, width=width, entry=(features,)), random(*shape)
    check_padded(
        table,
        lambda x, p: x * p,
        lambda row, i, p: row * p.expand(b, width, features)[i, : len(row)],
        [p],
    )


@ways
def test_tables_of_other_widths(way):
    a, b = make_table(), make_table(width=9)
    f = way(lambda x, y: x * y)
    for first, second in ((a, b), (b, a)):
        got = f(first.x, second.x)
        expected = [p * q for p, q in zip(first.rows, second.rows, strict=True)]
        assert got.shape == first.leaf.shape
        check_parts(first, got, expected, [second.leaf])


@ways
def test_a_mask_of_entries_from_a_dense_condition(way):
    table, keep = make_table(), torch.rand(4, 7, 1) > 0.5
    check_padded(
        table,
        lambda x: torch.where(keep, x, 0.0),
        lambda row, i: torch.where(keep[i, : len(row)], row, 0.0),
        way=way,
    )


def test_in_place():
    table = make_table()
    expected = [row.detach() * 2 + 1 for row in table.rows]
    x = table.x.detach()
    before = x.padded.data_ptr()
    x.mul_(2).add_(1)
    assert x.padded.data_ptr() == before
    torch.testing.assert_close(x.to_tensors(), expected)

    def twice(x):
        y = x * 1
        y.mul_(x)
        return y

    check_padded(table, twice, lambda row, _: row * row)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode):
    table, p = make_table(), random(7, 4)
    with mode():
        got = F.linear((table.x * 2 + p).tanh(), p).mean(1)
        assert not got.requires_grad
        expected = [F.linear((row * 2 + p[: len(row)]).tanh(), p).mean(0) for row in table.rows]
        torch.testing.assert_close(list(got), expected, equal_nan=True)


# ---- reductions ------------------------------------------------------------------------------------------------

SUMS = [torch.sum, torch.mean, torch.var, torch.std, torch.logsumexp, torch.linalg.vector_norm, torch.nansum]
EXTREMA = [torch.amax, torch.amin]
DIMS = [d for n in (1, 2, 3) for d in itertools.combinations(range(3), n)]


def judge(table, f, dims, keepdim, way):
    """``f(t, dims, keepdim)`` by loops: over rows, positions, or all entries, as the dimensions say."""
    got = way(lambda x: f(x, dims, keepdim))(table.x)
    features, rows = [d for d in dims if d == 2], table.rows
    merged = tuple([0] + [1] * len(features))
    if 0 in dims and 1 in dims:
        expected = f(torch.cat(rows), merged, keepdim)
        return check_parts(table, [got], [expected.unsqueeze(0) if keepdim else expected])
    if 0 in dims:
        longest = max(map(len, rows))
        positions = [torch.stack([row[t] for row in rows if len(row) > t]) for t in range(longest)]
        place = 1 if keepdim else 0
        expected = torch.stack([f(p, merged, keepdim) for p in positions], place)
        return check_parts(table, [got.narrow(place, 0, longest)], [expected])
    return check_parts(table, got, [f(row, tuple(d - 1 for d in dims), keepdim) for row in rows])


@pytest.mark.sweep(27)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
@ways
def test_sums(f, dims, keepdim, way):
    judge(make_table(), lambda t, d, k: f(t, dim=d, keepdim=k), dims, keepdim, way)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("f", EXTREMA, ids=lambda f: f.__name__)
def test_extrema(f, dims):
    table = make_table(lengths=[3, 7, 1])
    judge(table, lambda t, d, k: f(t, dim=d, keepdim=k), dims, False, WAYS[0])


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("f", [torch.sum, torch.mean, torch.var, torch.amax], ids=lambda f: f.__name__)
@pytest.mark.parametrize("places", ["[T, B]", "[D, B, T]"])
def test_reductions_of_rows_elsewhere(places, f, dim):
    table = make_table(places, lengths=[3, 7, 1], entry=(2, 3))
    b, r = table.batch_dim, table.ragged_dim
    if dim == r:
        parts = f(table.x, dim).unbind(b - (r < b))
        check_parts(table, parts, [f(row, r - (b < r)) for row in table.rows])
        return
    if dim != b:
        check_padded(table, lambda x: f(x, dim), lambda row, _: f(row, dim - (b < dim)))
        return
    place = r - (b < r)
    positions = [
        torch.stack([row.select(place, t) for row in table.rows if row.shape[place] > t]) for t in range(7)
    ]
    check_parts(table, [f(table.x, dim)], [torch.stack([f(p, 0) for p in positions], place)])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "f",
    [torch.sum, torch.mean, torch.var, torch.amax, torch.max, torch.prod, torch.norm],
    ids=lambda f: f.__name__,
)
@ways
def test_all_entries(f, way):
    table = make_table()
    check_parts(table, [way(f)(table.x)], [f(torch.cat(table.rows))])


@ways
def test_extrema_with_indices(way):
    table = make_table(lengths=[3, 7, 1])
    for f, part in itertools.product([torch.max, torch.min], [0, 1]):
        check_padded(table, lambda x: f(x, 1)[part], lambda row, _: f(row, 0)[part], way=way)  # noqa: B023
        check_padded(table, lambda x: f(x, 2)[part], lambda row, _: f(row, 1)[part], way=way)  # noqa: B023
    check_padded(table, lambda x: x.argmax(1), lambda row, _: row.argmax(0), way=way)


def test_norm_of_either_layout():
    table = make_table()
    whole = torch.cat(table.rows)
    for x in (table.x, table.x.to_jagged()):
        torch.testing.assert_close(torch.norm(x), torch.norm(whole))
        torch.testing.assert_close(x.norm(p=1), whole.norm(p=1))
        torch.testing.assert_close(torch.norm(x, 2, 2).to_tensors()[2], torch.norm(table.rows[2], 2, 1))


def test_discrete():
    rows = [torch.randint(0, 2, (n, 4)) for n in (3, 0, 5)]
    x = PaddedTensor.from_tensors(rows, multiple=8)
    poisons = x.with_padded(x.to_dense(fill=7)), x
    for f, poison in itertools.product([torch.any, torch.all, torch.count_nonzero], poisons):
        assert torch.equal(f(poison, dim=1), torch.stack([f(row, dim=0) for row in rows]))
        assert torch.equal(f(poison), f(torch.cat(rows)))


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("f", [torch.mean, torch.var, torch.std], ids=lambda f: f.__name__)
def test_half_precision_does_not_overflow(f, layout):
    rows = [(torch.rand(n, 2) * 200 + 200).half() for n in (500, 3)]
    x = PaddedTensor.from_tensors(rows, multiple=16)
    x = x if layout == "padded" else x.to_jagged()
    got = f(x, 1)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, torch.stack([f(row, 0) for row in rows]), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("f", [torch.amax, torch.argmax], ids=lambda f: f.__name__)
def test_an_empty_row_has_no_extremum(f):
    with pytest.raises(RuntimeError, match="has no entries"):
        f(make_table().x, 1)


@pytest.mark.parametrize("dim", [3, -4, (0, 0)])
def test_no_such_dimension(dim):
    with pytest.raises(IndexError, match="distinct dimensions of a PaddedTensor"):
        make_table().x.sum(dim)


@pytest.mark.sweep(18)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "f",
    [
        torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod, torch.logcumsumexp,
        lambda t, d: t.cummax(d)[0], lambda t, d: t.cummin(d)[1],
        lambda t, d: t.sort(d)[0], lambda t, d: t.sort(d, descending=True)[0], lambda t, d: t.argsort(d),
    ],
)  # fmt: skip
@ways
def test_along(f, dim, way):
    check_padded(make_table(), lambda x: f(x, dim), lambda row, _: f(row, dim - 1), way=way)


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("descending", [False, True])
def test_extreme_entries_sort_before_the_padding(descending, layout):
    inf, nan = float("inf"), float("nan")
    rows = [torch.tensor(row) for row in ([1.0, nan, -inf, inf], [-inf], [inf, inf, nan], [])]
    x = PaddedTensor.from_tensors(rows, multiple=6)
    x = x if layout == "padded" else x.to_jagged()
    for part, number in itertools.product((0, 1), range(4)):
        got = x.sort(1, descending=descending)[part].to_tensors()[number]
        wanted = rows[number].sort(dim=0, descending=descending, stable=True)[part]
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("f", [torch.var_mean, torch.std_mean], ids=lambda f: f.__name__)
def test_two_at_once(f):
    table = make_table(lengths=[3, 7, 2])
    for part, options in itertools.product(
        (0, 1), ({}, {"correction": 0}, {"keepdim": True}, {"unbiased": False})
    ):
        check_padded(table, lambda x: f(x, 2, **options)[part], lambda row, _: f(row, 1, **options)[part])  # noqa: B023
        parts = f(table.x, 1, **options)[part]
        check_parts(table, list(parts), [f(row, 0, **options)[part] for row in table.rows])


# ---- layers ----------------------------------------------------------------------------------------------------


@ways
def test_linear(way):
    w, b = random(5, 4), random(5)
    check_padded(make_table(), F.linear, lambda row, _, w, b: F.linear(row, w, b), [w, b], way)
    check_padded(make_table("[T, B]"), F.linear, lambda row, _, w, b: F.linear(row, w, b), [w, b], way)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@ways
def test_norms(name, way):
    f = getattr(F, name)
    parameters = [random(4)] + ([random(4)] if name == "layer_norm" else [])
    check_padded(
        make_table(), lambda x, *p: f(x, (4,), *p), lambda row, _, *p: f(row, (4,), *p), parameters, way
    )
    check_padded(make_table(), lambda x: f(x, (4,)), lambda row, _: f(row, (4,)), way=way)


@pytest.mark.parametrize("padding_idx", [None, 0])
@ways
def test_embedding(padding_idx, way):
    table, weight = make_table(entry=()), random(6, 3)
    indices = [torch.randint(0, 6, row.shape) for row in table.rows]
    x = PaddedTensor.from_tensors(indices, multiple=7)
    x = x.with_padded(x.to_dense(fill=10**9))  # out of range
    got = way(lambda x, w: F.embedding(x, w, padding_idx))(x, weight)
    check_parts(table, got, [F.embedding(i, weight, padding_idx) for i in indices], [weight])


@ways
def test_matmul_with_a_matrix_or_one_for_each_row(way):
    w, per_row = random(4, 5), random(4, 4, 5)
    check_padded(make_table(), lambda x, w: x @ w, lambda row, _, w: row @ w, [w], way)
    check_padded(make_table(), torch.bmm, lambda row, i, w: row @ w[i], [per_row], way)
    check_padded(make_table("[B, D, T]"), lambda x, w: w.mT @ x, lambda row, _, w: w.mT @ row, [w], way)
    check_padded(make_table(entry=(3, 4)), lambda x, w: x @ w, lambda row, _, w: row @ w, [w], way)


@ways
def test_matmul_contracts_what_exists(way):
    check_padded(make_table(), lambda x: x.mT @ (x * 2), lambda row, _: row.mT @ (row * 2), way=way)
    check_padded(
        make_table(entry=(2, 4)),
        lambda x: x @ x.mT.tanh(),
        lambda row, _: row @ row.mT.tanh(),
        way=way,
    )


def test_a_dense_operand_makes_no_new_rows():
    x, wider = make_table(lengths=[3]).x, torch.ones(5, 4, 2, dtype=torch.float64)
    for op in (lambda: x @ wider, lambda: x.like_dense(torch.ones(5, 7, 4)), lambda: x * wider[:, :1, :1]):
        with pytest.raises(ValueError, match="Padded"):
            op()


def test_dropout():
    table = make_table()
    check_padded(table, lambda x: F.dropout(x, training=False), lambda row, _: row)
    got = F.dropout(table.x, 0.5)
    for mine, row in zip(got.to_tensors(), table.rows, strict=True):
        assert ((mine == 0) | (mine == row * 2)).all()
    got.sum().backward()
    assert not table.leaf.grad.isnan().any()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "bias", "of the lengths"])
@ways
def test_attention(is_causal, mask, way):
    if is_causal and mask:
        pytest.skip("PyTorch takes one of the two")
    table, parameters = make_table(entry=(8,)), []
    if mask:
        m = torch.rand(4, 1, 7, 7) > 0.3
        m[..., 0] = True
        if mask == "of the lengths":  # whole rows of scores are masked, where no query exists
            m = (table.x.mask()[:, :, None] & table.x.mask()[:, None, :]).unsqueeze(1)
        parameters = [random(7, 7) if mask == "bias" else m]

    def on_padded(x, *m):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (x, x * 2, x.tanh()))
        out = F.scaled_dot_product_attention(q, k, v, *m, is_causal=is_causal)
        return out.transpose(1, 2).flatten(2)

    def on_row(row, i, *m):
        if not len(row):
            return row * 1
        n = len(row)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(0, 1) for t in (row, row * 2, row.tanh()))
        m = [(t if mask == "bias" else t[i])[..., :n, :n] for t in m]
        return F.scaled_dot_product_attention(q, k, v, *m, is_causal=is_causal).transpose(0, 1).flatten(1)

    check_padded(table, on_padded, on_row, parameters, way)


@ways
def test_cross_attention_and_rows_without_keys(way):
    asked, given = make_table(entry=(4,)), make_table(lengths=[2, 3, 0, 6], width=6)
    got = way(lambda q, k: F.scaled_dot_product_attention(q, k, k * 2))(asked.x, given.x)
    expected = [
        F.scaled_dot_product_attention(q, k, k * 2) if len(k) else q * 0
        for q, k in zip(asked.rows, given.rows, strict=True)
    ]
    check_parts(asked, got, expected, [given.leaf])


# ---- losses ----------------------------------------------------------------------------------------------------


@pytest.mark.sweep(9)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}, {"weight": True}])
@pytest.mark.parametrize("probabilities", [False, True])
@ways
def test_cross_entropy(reduction, options, probabilities, way):
    if probabilities and "ignore_index" in options:
        pytest.skip("indices only")
    table = make_table()
    if "weight" in options:
        options = {"weight": torch.rand(4, dtype=torch.float64)}
    targets = [
        torch.rand(len(row), 4, dtype=torch.float64) if probabilities else torch.randint(0, 4, (len(row),))
        for row in table.rows
    ]
    y = PaddedTensor.from_tensors(targets, multiple=7)
    y = y.with_padded(y.to_dense(fill=float("nan") if probabilities else 10**9))
    y = y.transpose(1, 2) if probabilities else y
    got = way(lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction=reduction, **options))(table.x, y)
    if reduction == "none":
        expected = [
            F.cross_entropy(row, t, reduction="none", **options)
            for row, t in zip(table.rows, targets, strict=True)
        ]
        check_parts(table, got, expected)
        return
    expected = F.cross_entropy(torch.cat(table.rows), torch.cat(targets), reduction=reduction, **options)
    check_parts(table, [got], [expected])


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # of the judge
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "f", [F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.kl_div, F.binary_cross_entropy_with_logits]
)
def test_losses(f, dense, reduction):
    table, p = make_table(), torch.rand(4, 7, 4, dtype=torch.float64, requires_grad=True)
    slices = table.slices(p)

    def on_padded(x, p):
        return f(x, p if dense else table.x.with_padded(p * 1), reduction=reduction)

    if f is F.binary_cross_entropy_with_logits or not dense:
        p = p.detach()
        slices = table.slices(p)
    if reduction == "none":
        check_padded(table, on_padded, lambda row, i, p: f(row, table.slices(p)[i], reduction="none"), [p])
        return
    expected = f(torch.cat(table.rows), torch.cat(slices), reduction=reduction)
    check_parts(table, [on_padded(table.x, p)], [expected], [p])


# ---- views -----------------------------------------------------------------------------------------------------

VIEWS = {  # of [B, T, 6, 4] and [T, 6, 4]
    "transpose": (lambda x: x.transpose(1, 2), lambda r: r.transpose(0, 1)),
    "transpose batch": (lambda x: x.transpose(0, 1), lambda r: r),
    "permute": (lambda x: x.permute(0, 3, 1, 2), lambda r: r.permute(2, 0, 1)),
    "mT": (lambda x: x.mT, lambda r: r.mT),
    "unsqueeze": (lambda x: x.unsqueeze(1), lambda r: r.unsqueeze(0)),
    "unsqueeze 0": (lambda x: x.unsqueeze(0), lambda r: r.unsqueeze(0)),
    "unsqueeze -1": (lambda x: x.unsqueeze(-1).squeeze(-1), lambda r: r),
    "expand": (lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1, -1), lambda r: r.unsqueeze(1).expand(-1, 3, -1, -1)),
    "flatten": (lambda x: x.flatten(2), lambda r: r.flatten(1)),
    "unflatten": (lambda x: x.unflatten(2, (2, -1)), lambda r: r.unflatten(1, (2, -1))),
    "unflatten -1": (lambda x: x.unflatten(-1, (1, 4)), lambda r: r.unflatten(-1, (1, 4))),
    "view": (lambda x: x.view(4, 7, -1, 2), lambda r: r.reshape(len(r), 12, 2)),
    "view after": (lambda x: x.transpose(1, 2).contiguous().view(4, 3, 2, 7, 4),
                   lambda r: r.transpose(0, 1).reshape(3, 2, len(r), 4)),
    "reshape": (lambda x: x.transpose(2, 3).reshape(4, 7, 24), lambda r: r.transpose(1, 2).reshape(len(r), 24)),
    "select": (lambda x: x.select(2, 1), lambda r: r.select(1, 1)),
    "index": (lambda x: x[:, :, 1:5, -1], lambda r: r[:, 1:5, -1]),
    "ellipsis": (lambda x: x[..., ::2], lambda r: r[..., ::2]),
    "narrow": (lambda x: x.narrow(3, 1, 2), lambda r: r.narrow(2, 1, 2)),
    "chunk": (lambda x: x.chunk(3, 2)[1], lambda r: r.chunk(3, 1)[1]),
    "split": (lambda x: x.split([1, 3], -1)[1], lambda r: r.split([1, 3], -1)[1]),
    "cat": (lambda x: torch.cat([x, x * 2], -1), lambda r: torch.cat([r, r * 2], -1)),
    "stack": (lambda x: torch.stack([x, x * 2], 1), lambda r: torch.stack([r, r * 2], 0)),
    "unbind": (lambda x: x.unbind(-1)[2], lambda r: r.unbind(-1)[2]),
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.parametrize("view", VIEWS)
@ways
def test_views(view, way):
    on_padded, on_row = VIEWS[view]
    check_padded(make_table(entry=(6, 4)), on_padded, lambda row, _: on_row(row), way=way)


@ways
def test_cat_with_a_dense_operand(way):
    table, p = make_table(), random(4, 7, 2)
    check_padded(
        table,
        lambda x, p: torch.cat([p, x], 2),
        lambda row, i, p: torch.cat([p[i, : len(row)], row], 1),
        [p],
        way,
    )


def test_views_share_memory():
    x = make_table(entry=(6, 4)).x.detach()
    for view in (x.transpose(1, 2), x.flatten(2), x[..., 1:], x.unsqueeze(0), x.chunk(3, 2)[0]):
        assert view._is_view()
        view.zero_()
    assert all((row[:, :2] == 0).all() and (row[..., 1:] == 0).all() for row in x.to_tensors())


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 1, 4)])
@pytest.mark.parametrize("length", [0, 1])
def test_extents_of_one(shape, length):
    b, t, d = shape
    table = make_table(lengths=[length] * b, width=t, entry=(d,))
    p = random(1, 1, d)
    check_padded(
        table, lambda x, p: (x + p).unflatten(-1, (1, d)), lambda r, _, p: (r + p[0]).unsqueeze(1), [p]
    )
    assert table.x.squeeze().sum() == table.x.detach().to_dense().sum()
