"""Layers, products and losses, on both layouts, with a loop over the rows as judge; gradients of parameters too."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.subclasses.ragged.judge import (
    KINDS,
    LAYOUTS,
    LENGTHS,
    WAYS,
    alike,
    check_parts,
    eager,
    hold,
    judge_rows,
    judged,
    kinds,
    layouts,
    make,
    pairs_of,
    random,
    refused,
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
    sweep=60,
)


@pytest.mark.sweep(6)
@ways
@layouts
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embedding(padding_idx, layout, way):
    batch, weight = make(layout, entry=()), random(6, 3)
    rows = [torch.randint(0, 6, (n,)) for n in LENGTHS]
    got = way(lambda x, w: F.embedding(x, w, padding_idx))(hold(layout, rows), weight)
    check_parts(batch, got, [F.embedding(row, weight, padding_idx) for row in rows], [weight])


@kinds
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_look_at_all_indices(kind, options):
    rows, weight = [torch.randint(0, 5, (n,)) for n in LENGTHS], torch.randn(5, 3, dtype=torch.float64)
    if kind != "jagged":
        with pytest.raises(DispatchError, match=r"embedding: max_norm.*from_tensors"):
            F.embedding(KINDS[kind](rows), weight, **options)
    leaves = [weight.clone().requires_grad_() for _ in range(2)]
    got = F.embedding(JaggedTensor.from_tensors(rows), leaves[0], **options).unwrap("values")
    expected = F.embedding(torch.cat(rows), leaves[1], **options)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(t.square().sum(), w) for t, w in zip((got, expected), leaves, strict=True)]
    torch.testing.assert_close(*grads)


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


@pytest.mark.sweep(24)
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


def test_products_of_rows_with_other_upper_bounds():
    """The outer extents of the factors differ, and the lengths of their rows do not."""
    offsets, a, b = torch.tensor([0, 3, 4]), torch.randn(4, 2, 3), torch.randn(4, 3, 2)
    x, y = JaggedTensor(a, offsets, max_length=3), JaggedTensor(b, offsets.clone(), max_length=5)
    for first, second in ((x, y), (y.transpose(2, 3), x.transpose(2, 3))):
        expected = [p @ q for p, q in zip(first.to_tensors(), second.to_tensors(), strict=True)]
        torch.testing.assert_close((first @ second).to_tensors(), expected)


ONES = torch.ones(3, 4, dtype=torch.float64)
PARAMETERS = r": expected dense parameters"


def targets_of(x):
    """A class for each entry."""
    return (x[..., 0] * 0).nan_to_num().long()


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
            f"{loss.__name__}, {name}": (lambda x, call=call, f=loss: call(f, x, targets_of(x)), error, words)
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


@pytest.mark.sweep(3)
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
    if reduction == "none":
        pairs = zip(batch.rows, targets, strict=True)
        check_parts(batch, way(run)(batch.x, p), [loss(*pair, reduction="none") for pair in pairs], [p])
    else:
        expected = loss(torch.cat(batch.rows), torch.cat(targets), reduction=reduction)
        check_parts(batch, [way(run)(batch.x, p)], [expected], [p])


@pytest.mark.parametrize("dense", [(5, 4), (4, 1, 4)], ids=str)
def test_a_dense_target_that_broadcasts(dense):
    batch, target = make("holes"), torch.randn(dense, dtype=torch.float64)
    targets = [target.expand(4, 5, 4)[i, : len(row)] for i, row in enumerate(batch.rows)]
    expected = F.mse_loss(torch.cat(batch.rows), torch.cat(targets))
    check_parts(batch, [F.mse_loss(batch.x, target)], [expected])


FORMS = {
    "transposed": lambda t: t.transpose(1, 2) if t.dim() == 3 else t,
    "merged": lambda t: t.flatten(0, 1),
    "merged by view": lambda t: t.view(-1, *t.shape[2:]),
}
OPTIONS = [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}, {"weight": torch.rand(4).double()}]


def nll_loss(logits, target, **options):
    return F.nll_loss(logits.log_softmax(1), target, **options)


@pytest.mark.sweep(60)
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
        *((nll_loss, o, False) for o in OPTIONS if "label_smoothing" not in o),
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
    if reduction == "none":
        pairs = zip(batch.rows, rows, strict=True)
        check_parts(batch, got, [loss(*pair, reduction="none", **options) for pair in pairs])
    else:
        expected = loss(torch.cat(batch.rows), torch.cat(rows), reduction=reduction, **options)
        check_parts(batch, [got], [expected])


@pytest.mark.parametrize("probabilities", [False, True])
@layouts
def test_a_dense_target_of_classes(layout, probabilities):
    batch = make(layout)
    size = batch.x.shape[:2]
    dense = torch.rand(*size, 4, dtype=torch.float64) if probabilities else torch.randint(0, 4, size)
    together = torch.cat([t[: len(row)] for t, row in zip(dense, batch.rows, strict=True)])
    results = [F.cross_entropy(batch.x.mT, dense.mT if probabilities else dense)]
    if layout == "padded":
        results.append(F.cross_entropy(batch.x.view(-1, 4), dense.flatten(0, 1)))
    check_parts(batch, results, [F.cross_entropy(torch.cat(batch.rows), together)] * len(results))


@layouts
def test_a_target_that_lies_otherwise(layout):
    batch, targets = make(layout), [torch.randint(0, 4, (n,)) for n in LENGTHS]
    wider = PaddedTensor.from_tensors(targets, multiple=8)
    wider = hold("back to back" if layout == "holes" else "holes", targets) if layout != "padded" else wider
    expected = F.cross_entropy(torch.cat(batch.rows), torch.cat(targets))
    check_parts(batch, [F.cross_entropy(batch.x.mT, wider)], [expected])
