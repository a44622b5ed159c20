"""Layers and matrix products, with a loop over the rows as judge, the gradients of parameters included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subclasses import DispatchError
from subclasses.ragged import JaggedTensor
from tests.subclasses.ragged.judge import LAYOUTS, WAYS, check_parts, check_rows, eager, make_batch

LAYERS = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(3, 4), (3,)]),
    "linear without bias": (lambda x, w: F.linear(x, w), [(3, 4)]),
    "matmul": (lambda x, w: x @ w, [(4, 3)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(4,), (4,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w, 1e-6), [(4,)]),
    "softmax": (lambda x, w: F.softmax(x * w, -1), [(4,)]),
    "normalize": (lambda x, w: F.normalize(x * w, dim=-1), [(4,)]),
    "prelu-like": (lambda x, w: torch.where(x > 0, x, x * w), [(4,)]),
}


def parameters_of(shapes) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.sweep(45)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes", "not contiguous"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer, layout, way):
    f, shapes = LAYERS[layer]
    check_rows(make_batch(layout), way(f), lambda row, _, *p: f(row, *p), parameters_of(shapes))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes"])
def test_embedding(layout, way):
    batch = make_batch(layout, entry=(), dtype=torch.int64)
    if batch.lengths is not None:
        batch.leaf[3] = -7  # belongs to no row
    (weight,) = parameters_of([(9, 3)])
    check_rows(batch, way(F.embedding), lambda row, _, w: F.embedding(row, w), [weight])


def test_modules():
    layer = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 2)
    ).double()
    check_rows(
        make_batch("holes"), lambda x, *_: layer(x), lambda row, *_: layer(row), list(layer.parameters())
    )


def test_dropout():
    batch = make_batch(lengths=[400, 200])
    x = batch.x
    got = F.dropout(x, 0.25)
    kept = got.values != 0
    assert 0.6 < kept.double().mean() < 0.9
    torch.testing.assert_close(got.values[kept], batch.leaf[kept] / 0.75)
    assert F.dropout(x, 0.25, training=False).values.equal(batch.leaf)


# ---- products --------------------------------------------------------------------------------------------------

# (of a ragged [B, T, 4] and a dense operand, of a row and the dense one's part), by the operand's shape.
PRODUCTS = {
    "one for each row": (lambda x, w: x @ w, lambda r, i, w: r @ w[i], (4, 4, 3)),
    "dense first": (lambda x, w: w @ x.mT, lambda r, i, w: w @ r.mT, (3, 4)),
    "dense first, one for each row": (
        lambda x, w: torch.bmm(w, x.mT),
        lambda r, i, w: w[i] @ r.mT,
        (4, 3, 4),
    ),
    "a row with itself": (lambda x, w: x.mT @ (x * w), lambda r, i, w: r.mT @ (r * w), (4,)),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product, layout, way):
    on_ragged, on_row, shape = PRODUCTS[product]
    check_rows(make_batch(layout), way(on_ragged), on_row, parameters_of([shape]))


def test_products_with_heads():
    batch = make_batch("holes", entry=(2, 3))
    check_rows(
        batch,
        lambda x, w: x.transpose(1, 2) @ w,
        lambda r, i, w: r.transpose(0, 1) @ w[i],
        parameters_of([(4, 2, 3, 5)]),
    )


@pytest.mark.parametrize(
    "f", [lambda x: x @ x.mT, lambda x: x @ torch.randn(4, 4, 2, 3), lambda x: x.mT @ torch.randn(4, 5, 2)]
)
def test_products_that_have_no_ragged_result(f):
    with pytest.raises(DispatchError, match="matmul"):
        f(make_batch(dtype=torch.float32).x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.linear(x.mT, torch.randn(3, 5)),
        lambda x: F.layer_norm(x, (5, 4)),
        lambda x: F.linear(x, x),
    ],
)
def test_layers_along_the_rows_are_refused(f):
    with pytest.raises(DispatchError, match="ragged"):
        f(make_batch(dtype=torch.float32).x)


# ---- along the rows --------------------------------------------------------------------------------------------

ALONG = {
    "softmax": (lambda x, d: x.softmax(d)),
    "log_softmax": (lambda x, d: F.log_softmax(x, d)),
    "cumsum": (lambda x, d: x.cumsum(d)),
    "cumprod": (lambda x, d: torch.cumprod(x, dim=d)),
    "logcumsumexp": (lambda x, d: x.logcumsumexp(d)),
    "cummax": (lambda x, d: x.cummax(d)[0]),
    "sort": (lambda x, d: x.sort(d)[0]),
    "sort descending": (lambda x, d: x.sort(d, descending=True)[0]),
    "argsort": (lambda x, d: x.argsort(d)),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("f", ALONG)
def test_along_a_dimension(f, dim, layout):
    check_rows(make_batch(layout), lambda x: ALONG[f](x, dim), lambda row, _: ALONG[f](row, dim - 1))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[1:], ids=lambda w: w.__name__)
def test_along_a_dimension_in_graphs(way):
    check_rows(
        make_batch("holes"),
        way(lambda x: x.softmax(1).cumsum(1).log_softmax(2)),
        lambda row, _: row.softmax(0).cumsum(0).log_softmax(1),
    )


# ---- losses ----------------------------------------------------------------------------------------------------

LOSSES = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_losses(loss, reduction, layout, way):
    if way is not eager and (reduction == "sum" or loss not in LOSSES[:1]):
        pytest.skip("the same as the others")
    batch = make_batch(layout)

    def run(t):
        return loss(t, t.sigmoid().detach(), reduction=reduction)

    if reduction == "none":
        check_rows(batch, way(run), lambda row, _: run(row))
    else:
        check_parts(batch, [way(run)(batch.x)], [run(torch.cat(batch.rows))])


@pytest.mark.parametrize("dense", [(5, 4), (4, 1, 4), (4, 5, 4)], ids=str)
def test_a_dense_target(dense):
    batch, target = make_batch("holes"), torch.randn(dense, dtype=torch.float64)
    expected = target.expand(4, 5, 4)
    rows = [(row, expected[i, : len(row)]) for i, row in enumerate(batch.rows)]
    got = F.mse_loss(batch.x, target)
    check_parts(batch, [got], [F.mse_loss(torch.cat([r for r, _ in rows]), torch.cat([t for _, t in rows]))])


@pytest.mark.sweep(30)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("layout", ["back to back", "holes"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"ignore_index": 2},
        {"weight": torch.rand(4).double()},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_cross_entropy(options, layout, way):
    batch = make_batch(layout)
    classes = make_batch(layout, entry=(), dtype=torch.int64)
    classes.leaf.remainder_(4)
    if classes.lengths is not None:
        classes.leaf[3] = 99  # belongs to no row
    target = JaggedTensor(classes.leaf, batch.offsets, lengths=batch.lengths, max_length=5)

    def expected():
        return F.cross_entropy(torch.cat(batch.rows), torch.cat(classes.rows), **options)

    merged = way(lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(0, 1), **options))
    check_parts(batch, [merged(batch.x, target)], [expected()])
    if way is eager:
        check_parts(batch, [F.cross_entropy(batch.x.transpose(1, 2), target, **options)], [expected()])


def test_cross_entropy_of_each_entry():
    batch = make_batch("holes")
    target = torch.zeros_like(batch.x.detach()[..., 0]).long()
    got = F.cross_entropy(batch.x.transpose(1, 2), target, reduction="none")
    check_parts(
        batch,
        got.to_tensors(),
        [F.cross_entropy(r, torch.zeros(len(r)).long(), reduction="none") for r in batch.rows],
    )


def test_cross_entropy_with_probabilities():
    batch = make_batch("holes")
    got = F.cross_entropy(batch.x.flatten(0, 1), batch.x.detach().softmax(-1).flatten(0, 1))
    rows = torch.cat(batch.rows)
    check_parts(batch, [got], [F.cross_entropy(rows, rows.detach().softmax(-1))])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.cross_entropy(x, x),
        lambda x: F.cross_entropy(x.flatten(0, 1), x),
        lambda x: F.cross_entropy(torch.randn(9, 4), x.flatten(0, 1)),
        lambda x: F.mse_loss(x, x.flatten(0, 1)),
    ],
)
def test_losses_of_what_does_not_fit(f):
    with pytest.raises(DispatchError, match="JaggedTensor"):
        f(make_batch().x)


def test_products_of_rows_with_other_upper_bounds():
    """The outer extents of the factors differ, and the lengths of their rows do not."""
    offsets, a, b = torch.tensor([0, 3, 4]), torch.randn(4, 2, 3), torch.randn(4, 3, 2)
    x, y = JaggedTensor(a, offsets, max_length=3), JaggedTensor(b, offsets.clone(), max_length=5)
    for first, second in ((x, y), (y.transpose(2, 3), x.transpose(2, 3))):
        expected = [p @ q for p, q in zip(first.to_tensors(), second.to_tensors(), strict=True)]
        torch.testing.assert_close((first @ second).to_tensors(), expected)
