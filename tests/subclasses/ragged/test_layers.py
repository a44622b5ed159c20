"""Layers, products, norms, ``einsum`` and losses, with a loop over the rows as judge; gradients of parameters too."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    LAYOUTS,
    LENGTHS,
    WAYS,
    alike,
    check_parts,
    desugared,
    eager,
    hold,
    judge_rows,
    judged,
    judged_by_rows,
    layouts,
    make,
    pairs_of,
    random,
    refused,
    same,
    stock,
    two_ways,
    ways,
)

LAYERS = {
    "linear": (F.linear, [(3, 4), (3,)]),
    "linear without bias": (F.linear, [(3, 4)]),
    "linear of one feature": (F.linear, [(4,)]),
    "matmul": (lambda x, w: x @ w, [(4, 3)]),
    "matmul with a vector": (lambda x, w: x @ w, [(4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(4,), (4,)]),
    "layer_norm without weights": (lambda x: F.layer_norm(x, (4,)), []),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w, 1e-6), [(4,)]),
    "rms_norm without weights": (lambda x: F.rms_norm(x, (4,)), []),
    "softmax": (lambda x, w: F.softmax(x * w, -1), [(4,)]),
    "normalize": (lambda x, w: F.normalize(x * w, dim=-1), [(4,)]),
    "prelu-like": (lambda x, w: torch.where(x > 0, x, x * w), [(4,)]),
}


test_layers = judged(
    {name: (*alike(f), *shapes) for name, (f, shapes) in LAYERS.items()},
    pairs_of([*LAYOUTS, "not contiguous", "[T, B]"], WAYS),
    sweep=120,
)


@pytest.mark.sweep(12)
@ways
@layouts
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embedding(padding_idx, layout, way):
    batch, weight = make(layout, entry=()), random(6, 3)
    rows = [torch.randint(0, 6, (n,)) for n in LENGTHS]
    got = way(lambda x, w: F.embedding(x, w, padding_idx))(hold(layout, rows), weight)
    check_parts(batch, got, [F.embedding(row, weight, padding_idx) for row in rows], [weight])


LOOKS_AT_ALL = {"max_norm": {"max_norm": 0.5}, "frequencies": {"scale_grad_by_freq": True}}


def embedded_at_once(options):
    """Back to back, the entries are all indices of one call."""
    rows, weight = [torch.randint(0, 5, (n,)) for n in LENGTHS], torch.randn(5, 3, dtype=torch.float64)
    calls = JaggedTensor.from_tensors(rows), torch.cat(rows)
    leaves = [weight.clone().requires_grad_() for _ in calls]
    found = [F.embedding(x, w, **options) for x, w in zip(calls, leaves, strict=True)]
    values = [found[0].unwrap("values"), found[1]]
    grads = [torch.autograd.grad(t.square().sum(), w) for t, w in zip(values, leaves, strict=True)]
    return zip(values, grads, strict=True)


test_embeddings_that_look_at_all_indices = same(
    {name: lambda options=options: embedded_at_once(options) for name, options in LOOKS_AT_ALL.items()}
)
test_embeddings_that_would_look_at_padding_are_refused = refused(
    {
        name: (
            lambda x, options=options: F.embedding(x.nan_to_num().long(), random(5, 3), **options),
            DispatchError,
            r"embedding: max_norm.*from_tensors",
        )
        for name, options in LOOKS_AT_ALL.items()
    },
    ["holes", "padded"],
    entry=(),
)


@layouts
def test_dropout(layout):
    batch = make(layout, [400, 200])
    got, rows = F.dropout(batch.x, 0.25), torch.cat(batch.rows)
    mine = torch.cat(got.to_tensors())
    kept = mine != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(mine[kept], rows[kept] / 0.75)
    (grad,) = torch.autograd.grad(mine.sum(), batch.leaf)
    torch.testing.assert_close(grad[~batch.leaf.isnan()], kept.flatten() / 0.75, check_dtype=False)
    assert not grad.isnan().any()
    judge_rows(layout, lambda x: F.dropout(x, 0.25, training=False), lambda row, _: row)


# ---- products --------------------------------------------------------------------------------------------------

# Of a ragged value and a dense operand, of a row and its part of the dense one, by the shapes of operand and entry.
PRODUCTS = {
    "one for each row": (lambda x, w: x @ w, lambda r, i, w: r @ w[i], (4, 4, 3), (4,)),
    "large, one for each row": (lambda x, w: x @ w, lambda r, i, w: r @ w[i], (4, 300, 250), (300,)),
    "bmm": (torch.bmm, lambda r, i, w: r @ w[i], (4, 4, 3), (4,)),
    "dense first": (lambda x, w: w @ x.mT, lambda r, i, w: w @ r.mT, (3, 4), (4,)),
    "dense first, one for each row": (
        lambda x, w: torch.bmm(w, x.mT),
        lambda r, i, w: w[i] @ r.mT,
        (4, 3, 4),
        (4,),
    ),
    "matrices": (lambda x, w: x @ w, lambda r, i, w: r @ w, (4, 5), (3, 4)),
    "heads": (
        lambda x, w: x.transpose(1, 2) @ w,
        lambda r, i, w: r.transpose(0, 1) @ w[i],
        (4, 2, 3, 5),
        (2, 3),
    ),
    "heads with a vector": (
        lambda x, w: torch.matmul(x.transpose(1, 2), w),
        lambda r, i, w: r.transpose(0, 1) @ w,
        (4,),
        (2, 4),
    ),
    "a row with itself": (lambda x, w: x.mT @ (x * w), lambda r, i, w: r.mT @ (r * w), (4,), (4,)),
    "entries with themselves": (
        lambda x, w: x @ (x * w).mT.tanh(),
        lambda r, i, w: r @ (r * w).mT.tanh(),
        (4,),
        (2, 4),
    ),
}


@pytest.mark.sweep(48)
@ways
@layouts
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product, layout, way):
    on_ragged, on_row, shape, entry = PRODUCTS[product]
    judge_rows(layout, on_ragged, on_row, [random(*shape)], entry=entry, way=way)


test_a_product_with_a_table_of_features_first = judged(
    {"dense first": (lambda x, w: w.mT @ x, lambda row, _, w: w.mT @ row, (4, 5))},
    pairs_of(["[B, D, T]"], WAYS),
)


def with_bound(shape, bound):
    return JaggedTensor(torch.randn(shape), torch.tensor([0, 3, 4]), max_length=bound)


def products(first, second):
    return first @ second, [p @ q for p, q in zip(first.to_tensors(), second.to_tensors(), strict=True)]


test_products_of_rows_with_other_upper_bounds = same(
    {
        "a greater one": lambda: products(with_bound((4, 2, 3), 3), with_bound((4, 3, 2), 5)),
        "a smaller one": lambda: products(with_bound((4, 2, 3), 5), with_bound((4, 3, 2), 3)),
    }
)


ONES = torch.ones(3, 4, dtype=torch.float64)
PARAMETERS = r": expected dense parameters"


MISFITS = {
    "classes last": (lambda f, x, y: f(x, y), DispatchError, r"transpose\(1, 2\)"),
    "dense logits": (lambda f, x, y: f(ONES, y.flatten(0, 1)), DispatchError, "expected ragged logits"),
    "merged targets": (lambda f, x, y: f(x.mT, y.flatten(0, 1)), DispatchError, "do not fit together"),
    "a dimension too many": (lambda f, x, y: f(x.mT, y.unsqueeze(-1)), DispatchError, "do not fit together"),
    "an old option": (lambda f, x, y: f(x.mT, y, size_average=True), DispatchError, "use reduction"),
    "no reduction": (
        lambda f, x, y: f(x.mT, y, reduction="most"),
        ValueError,
        "not a valid value for reduction",
    ),
    "other lengths": (lambda f, x, y: f(x.mT, y[:, 1:]), ValueError, "same length"),
}

test_what_does_not_fit_is_refused = refused(
    {
        # products along the rows
        "rows with themselves": (lambda x: x @ x.mT, DispatchError, "matmul"),
        "dimensions": (lambda x: x @ random(4, 4, 2, 3), DispatchError, "matmul"),
        "a dense factor of positions": (lambda x: x.mT @ random(4, 5, 2), DispatchError, "matmul"),
        "a vector of places": (lambda x: x.mT @ random(x.shape[1]), DispatchError, "matmul"),
        "a matrix of rows": (lambda x: random(5, 4) @ x[..., 0], DispatchError, "matmul"),
        "a vector of rows": (lambda x: random(4) @ x[..., 0], DispatchError, "matmul"),
        # layers along the rows, and with ragged parameters
        "linear of rows": (lambda x: F.linear(x.mT, random(3, 5)), DispatchError, "ragged"),
        "layer_norm of rows": (lambda x: F.layer_norm(x, (5, 4)), DispatchError, "ragged"),
        "linear": (lambda x: F.linear(ONES, x), DispatchError, f"linear{PARAMETERS}"),
        "linear of ragged ones": (lambda x: F.linear(x, x), DispatchError, "ragged"),
        "layer_norm": (lambda x: F.layer_norm(ONES, (4,), x), DispatchError, f"layer_norm{PARAMETERS}"),
        "rms_norm": (lambda x: F.rms_norm(ONES, (4,), x), DispatchError, f"rms_norm{PARAMETERS}"),
        "embedding": (lambda x: F.embedding(ONES.long(), x), DispatchError, f"embedding{PARAMETERS}"),
        # losses
        "a merged target": (lambda x: F.mse_loss(x, x.flatten(0, 1)), DispatchError, "Tensor"),
        **{
            f"{loss.__name__}, {name}": (
                # A class for each entry.
                lambda x, call=call, f=loss: call(f, x, (x[..., 0] * 0).nan_to_num().long()),
                error,
                words,
            )
            for loss in (F.cross_entropy, F.nll_loss)
            for name, (call, error, words) in MISFITS.items()
        },
    }
)
test_a_dense_operand_makes_no_new_rows = refused(
    {
        "product": (lambda x: x @ random(5, 4, 2), ValueError, "Padded"),
        "like_dense": (lambda x: x.like_dense(random(5, 7, 4)), ValueError, "Padded"),
        "factor": (lambda x: x * random(5, 1, 1), ValueError, "Padded"),
    },
    ["padded"],
    lengths=[3],
)

# ---- losses ----------------------------------------------------------------------------------------------------

LOSSES = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div]
REDUCTIONS = ["none", "sum", "mean"]


def check_loss(batch, got, loss, targets, reduction, parameters=()):
    """A loss of each entry, or of all entries as of plain tensors."""
    if reduction == "none":
        pairs = zip(batch.rows, targets, strict=True)
        check_parts(batch, got, [loss(*pair, reduction="none") for pair in pairs], parameters)
    else:
        expected = loss(torch.cat(batch.rows), torch.cat(targets), reduction=reduction)
        check_parts(batch, [got], [expected], parameters)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("loss", "reduction", "way"),
    [
        *((*pair, eager) for pair in itertools.product(LOSSES, REDUCTIONS)),
        *((F.mse_loss, *pair) for pair in itertools.product(["none", "mean"], WAYS[1:])),
    ],
)
@pytest.mark.parametrize("dense", [False, True], ids=["ragged target", "dense target"])
@layouts
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_losses(layout, dense, loss, reduction, way):
    batch = make(layout)
    p = torch.rand(batch.x.shape, dtype=torch.float64)
    p.requires_grad_(dense and loss is not F.binary_cross_entropy_with_logits)

    def run(x, p):
        return loss(x, p if dense else x.detach().like_dense(p), reduction=reduction)

    targets = [p[i, : len(row)] for i, row in enumerate(batch.rows)]
    check_loss(batch, way(run)(batch.x, p), loss, targets, reduction, [p])


@pytest.mark.parametrize("dense", [(5, 4), (4, 1, 4)], ids=str)
def test_a_dense_target_that_broadcasts(dense):
    batch, target = make("holes"), torch.randn(dense, dtype=torch.float64)
    targets = [target.expand(4, 5, 4)[i, : len(row)] for i, row in enumerate(batch.rows)]
    check_loss(batch, F.mse_loss(batch.x, target), F.mse_loss, targets, "mean")


FORMS = {
    "transposed": lambda t: t.transpose(1, 2) if t.dim() == 3 else t,
    "merged": lambda t: t.flatten(0, 1),
    "merged by view": lambda t: t.view(-1, *t.shape[2:]),
}
OPTIONS = [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}, {"weight": torch.rand(4).double()}]


@pytest.mark.sweep(240)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("loss", "options", "probabilities"),
    [
        *(
            (F.cross_entropy, o, p)
            for o in OPTIONS
            for p in (False, True)
            if not p or "ignore_index" not in o
        ),
        *(
            (lambda logits, target, **options: F.nll_loss(logits.log_softmax(1), target, **options), o, False)
            for o in OPTIONS
            if "label_smoothing" not in o
        ),
    ],
    ids=lambda v: v.__name__ if callable(v) else "+".join(v) or "plain" if isinstance(v, dict) else str(v),
)
@pytest.mark.parametrize("form", FORMS)
@ways
@layouts
def test_losses_of_classes(layout, way, form, loss, options, probabilities, reduction):  # noqa: PLR0913
    batch, f = make(layout), FORMS[form]
    rows = [
        torch.rand(n, 4, dtype=torch.float64) if probabilities else torch.randint(0, 4, (n,)) for n in LENGTHS
    ]
    got = way(lambda x, y: loss(f(x), f(y), reduction=reduction, **options))(batch.x, hold(layout, rows))
    check_loss(batch, got, functools.partial(loss, **options), rows, reduction)


@pytest.mark.parametrize("probabilities", [False, True])
@layouts
def test_a_dense_target_of_classes(layout, probabilities):
    batch = make(layout)
    size = batch.x.shape[:2]
    dense = torch.rand(*size, 4, dtype=torch.float64) if probabilities else torch.randint(0, 4, size)
    targets = [t[: len(row)] for t, row in zip(dense, batch.rows, strict=True)]
    got = F.cross_entropy(batch.x.mT, dense.mT if probabilities else dense)
    check_loss(batch, got, F.cross_entropy, targets, "mean")
    if layout == "padded":
        merged = F.cross_entropy(batch.x.view(-1, 4), dense.flatten(0, 1))
        check_loss(batch, merged, F.cross_entropy, targets, "mean")


@layouts
def test_a_target_that_lies_otherwise(layout):
    batch, targets = make(layout), [torch.randint(0, 4, (n,)) for n in LENGTHS]
    wider = PaddedTensor.from_tensors(targets, multiple=8)
    wider = hold("back to back" if layout == "holes" else "holes", targets) if layout != "padded" else wider
    check_loss(batch, F.cross_entropy(batch.x.mT, wider), F.cross_entropy, targets, "mean")


# ==== norms and bags ================================================================================================

FULL = [3, 2, 5, 4]
W, B = random(4), random(4)

NORMS = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "one group": lambda x, w, b: F.group_norm(x, 1),
    "instance_norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
}
MERGED = {
    "batch_norm": lambda t, w, b: F.batch_norm(t, None, None, w, b, training=True),
    "group_norm": lambda t, w, b: F.group_norm(t, 2, w, b),
}

test_of_each_row = judged(
    {
        name: (
            lambda x, w, b, f=f: f(x.transpose(1, 2), w, b).transpose(1, 2),
            lambda row, _, w, b, f=f: f(row.mT[None], w, b)[0].mT,
            *(W, B),
        )
        for name, f in NORMS.items()
    },
    pairs_of(LAYOUTS, [eager, desugared]),
    sweep=36,
    lengths=FULL,
)
test_merged_dimensions = judged(
    {
        name: (
            lambda x, w, b, f=f: f(x.flatten(0, 1), w, b).square().sum(0),
            lambda entries, w, b, f=f: f(entries, w, b).square().sum(0),
            *(W, B),
        )
        for name, f in MERGED.items()
    },
    lengths=FULL,
    whole=True,
)


def has_nan(layout):
    batch = make(layout, [3, 0, 2])
    got = F.group_norm(batch.x.transpose(1, 2), 2, W, B)
    of_leaf, *others = torch.autograd.grad(got.sum(), [batch.leaf, W, B])
    return [bool(g.isnan().any()) for g in (torch.where(batch.leaf.isnan(), 0, of_leaf), *others)]


def in_half_precision(layout):
    x = make(layout, FULL).x.detach().to(torch.bfloat16).transpose(1, 2)
    return F.group_norm(x, 2), [F.group_norm(row[None], 2)[0] for row in x.to_tensors()]


test_group_norm = same(
    {
        "an empty row makes nothing NaN": lambda layout: (has_nan(layout), [False] * 3),
        "half precision": in_half_precision,
    },
    *LAYOUTS,
)


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("layout", "way"), [pair for pair in pairs_of(LAYOUTS, WAYS) if pair != ("padded", stock)]
)
def test_batch_norm(layout, way):
    batch, ours, theirs = make(layout, FULL), *(torch.nn.BatchNorm1d(4).double() for _ in range(2))
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    compiled = way(ours)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        got, together = compiled(batch.x.transpose(1, 2)).transpose(1, 2), theirs(torch.cat(batch.rows))
        torch.testing.assert_close(got.to_tensors(), list(together.split(FULL)))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        grads = [torch.autograd.grad(t.square().sum(), batch.leaf)[0] for t in (got, together)]
        torch.testing.assert_close(*(g.nan_to_num(0) for g in grads))


TURN = r"transpose\(1, 2\)|each row of which is a bag"
STATISTICS = torch.zeros(4), torch.ones(4)

test_what_is_refused = refused(
    {
        "group_norm": (lambda x: F.group_norm(x, 1), DispatchError, TURN),
        "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), DispatchError, TURN),
        "instance_norm": (lambda x: F.instance_norm(x), DispatchError, TURN),
        "embedding_bag": (lambda x: F.embedding_bag(x.long(), torch.ones(3, 2)), DispatchError, TURN),
        "groups": (
            lambda x: F.group_norm(x.transpose(1, 2), 3),
            RuntimeError,
            "do not make 3 groups",
        ),
        "statistics": (
            lambda x: F.instance_norm(x.transpose(1, 2), *STATISTICS),
            DispatchError,
            "their own mean",
        ),
        "weights of samples of a mean": (
            lambda x: F.embedding_bag(
                x.to_tensors() and x[..., 0].nan_to_num().long(),
                random(9, 3),
                mode="mean",
                per_sample_weights=x[..., 0],
            ),
            DispatchError,
            "go with mode='sum'",
        ),
    },
    lengths=FULL,
)


# ---- bags ------------------------------------------------------------------------------------------------------

ROWS = [torch.tensor(row, dtype=torch.int64) for row in ([1, 2, 2], [], [8, 8], [2, 0, 5])]


@pytest.mark.sweep(24)
@two_ways
@layouts
@pytest.mark.parametrize(
    ("mode", "padding_idx", "weighted"),
    [
        *((mode, index, False) for mode in ("sum", "mean", "max") for index in (None, 2, -1)),
        ("sum", None, True),
    ],
)
def test_embedding_bag(layout, mode, padding_idx, weighted, way):
    table = random(9, 3)

    def bags(x, table, *offsets):
        weights = x.double() * 0.5 + 1 if weighted else None
        options = {"mode": mode, "padding_idx": padding_idx, "per_sample_weights": weights}
        return F.embedding_bag(x, table, *offsets, **options)

    got = way(bags)(hold(layout, ROWS), table)
    expected = torch.cat([bags(row, table, torch.zeros(1, dtype=torch.int64)) for row in ROWS])
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(t, table, cotangent)[0] for t in (got, expected)))


# ==== einsum ========================================================================================================

ONE = {
    "btd,de->bte": lambda row, w: row @ w,
    "...d,de->...e": lambda row, w: row @ w,
    "btd,de->bet": lambda row, w: (row @ w).mT,
    "btd,de->be": lambda row, w: (row @ w).sum(0),
    "btd,de": lambda row, w: (row @ w).mT,  # in the order of the alphabet
    "b...d,de->b...e": lambda row, w: row @ w,
}
ITSELF = {
    "btd,btd->bt": lambda row: (row * row).sum(-1),
    "btd,bte->bde": lambda row: row.mT @ row,
    "btd,btd->b": lambda row: (row * row).sum(),
    "btd,bse->bde": lambda row: row.sum(0)[:, None] * row.sum(0),
    "btd,bsd->bt": lambda row: row @ row.sum(0),
    "btd->bd": lambda row: row.sum(0),
    "btd->bdt": lambda row: row.mT,
    "btd->bt": lambda row: row.sum(1),
}
EXISTS = torch.arange(max(LENGTHS))[:, None] < torch.tensor(LENGTHS)
# One number for each place and row; NaN where a row has no entry.
EACH = torch.where(EXISTS, torch.arange(20.0, dtype=torch.float64).view(5, 4), torch.nan)
DENSE = {
    "btd,bd->bt": (lambda row, i, t: row @ t[i], (4, 4)),
    "btd,t->bd": (lambda row, i, t: t[: len(row)] @ row, (5,)),
    "btd,tb->btd": (lambda row, i, t: row * t[: len(row), i, None], EACH),
    "btd,tb->bd": (lambda row, i, t: t[: len(row), i] @ row, EACH),
}
WITH_A_MATRIX = {
    equation: (
        lambda x, w, equation=equation: torch.einsum(equation, x, w),
        lambda row, _, w, f=f: f(row, w),
        (4, 6),
    )
    for equation, f in ONE.items()
}


test_with_a_matrix = judged(WITH_A_MATRIX, pairs_of(LAYOUTS, [eager, desugared]), sweep=24)
test_under_stock_compile = judged(
    {"btd,de->bte": WITH_A_MATRIX["btd,de->bte"]}, pairs_of(["back to back", "padded"], [stock])
)
# In float32 by PyTorch's grouped product, and in float64, which that refuses, by a table.
test_a_matrix_for_each_row = judged(
    {
        f"{dtype} {name}": (
            lambda x, w, dtype=dtype, turn=turn: (x.to(dtype) @ turn(w.to(dtype))).double(),
            lambda row, i, w, dtype=dtype, turn=turn: (row.to(dtype) @ turn(w[i].to(dtype))).double(),
            (4, 4, 4),
        )
        for dtype in (torch.float32, torch.float64)
        for name, turn in {"matrices": lambda w: w, "transposes": lambda w: w.mT}.items()
    },
    pairs_of(LAYOUTS, [eager, desugared, stock]),
    atol=1e-5,
    rtol=1e-5,
)
test_with_itself = judged(
    {
        equation: (
            lambda x, equation=equation: torch.einsum(equation, *[x] * (equation.count(",") + 1)),
            lambda row, _, f=f: f(row),
        )
        for equation, f in ITSELF.items()
    }
    | {"as lists": (lambda x: torch.einsum(x, [0, 1, 2], [0, 2]), lambda row, _: row.sum(0))}
)
test_with_dense_operands_that_know_rows_or_places = judged(
    {
        equation: (lambda x, t, equation=equation: torch.einsum(equation, x, t), *case)
        for equation, case in DENSE.items()
    },
    width=max(LENGTHS),
)
test_einsum_of_merged_dimensions = judged(
    {
        "nd,de->ne": (
            lambda x, w: torch.einsum("nd,de->ne", x.flatten(0, 1), w).unflatten(0, x.shape[:2]),
            lambda row, _, w: row @ w,
            (4, 6),
        )
    }
)
test_sums_over_rows = judged(
    {
        "btd,bte->de": (lambda x: torch.einsum("btd,bte->de", x, x), lambda entries: entries.mT @ entries),
        "nd,ne->de": (
            lambda x: torch.einsum("nd,ne->de", *[x.flatten(0, 1)] * 2),
            lambda entries: entries.mT @ entries,
        ),
    },
    whole=True,
)


def with_others(equation, of_rows):
    """A function of rows and of the same rows that lie elsewhere."""
    return (
        lambda x, y: torch.einsum(equation, x, y),
        lambda rows, others: [of_rows(p, q) for p, q in zip(rows, others, strict=True)],
        lambda layout: make("padded" if layout == "padded" else "holes", width=9),
    )


test_rows_that_lie_elsewhere = judged_by_rows(
    {
        "btd,bte->bde": with_others("btd,bte->bde", lambda p, q: p.mT @ q),
        "btd,btd->bt": with_others("btd,btd->bt", lambda p, q: (p * q).sum(1)),
    }
)
test_sums_by_place = same(
    {"btd->td": lambda layout: (lambda x: (torch.einsum("btd->td", x), x.sum(0)))(make(layout).x)}, *LAYOUTS
)


SDPA = r"two ragged dimensions; use F\.scaled_dot"

test_what_einsum_refuses = refused(
    {
        "two ragged dimensions": (lambda x: torch.einsum("btd,bsd->bts", x, x), DispatchError, SDPA),
        "two letters": (
            lambda x: torch.einsum("btd,ctd->bc", x, x),
            DispatchError,
            "one letter for the rows of all ragged operands",
        ),
        "an operand too few": (
            lambda x: torch.einsum("btd,de->bte", x),
            ValueError,
            "names 2 operands, got 1",
        ),
        "a letter too few": (
            lambda x: torch.einsum("bt->b", x),
            ValueError,
            "'bt' in 'bt->b' does not fit a tensor",
        ),
        "other lengths": (
            lambda x: torch.einsum("btd,btd->bt", x, x[[1, 0, 2, 3]]),
            ValueError,
            "got lengths|other lengths",
        ),
    }
)
test_rows_of_jagged_tensors_come_first = refused(
    {"letters": (lambda x: torch.einsum("btd->tbd", x), DispatchError, "put their letter first")}, LAYOUTS[:2]
)
