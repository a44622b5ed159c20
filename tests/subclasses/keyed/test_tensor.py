"""Keyed tensors: construction, conversion to rows by key, and joins."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor
from subclasses.testing import suite
from tests.subclasses.keyed.batches import COMPILED as COMPILED_WAYS, LENGTHS, WAYS, batch
from tests.subclasses.ragged.judge import numbers_of
from tests.tables import giving

# ---- one value -------------------------------------------------------------------------------------------------


X = KeyedJaggedTensor(["a", "b"], torch.arange(6), torch.tensor([1, 2, 0, 3]))
W = batch([1, 2, 0, 3], weighted=True)

test_keys_lengths_and_rows = giving(
    {
        "keys": (lambda: X.keys, ("a", "b")),
        "sizes": (lambda: (X.batch_size, X.max_length, X.shape), (2, 3, (2, 2, 3))),
        "dtype": (lambda: X.dtype, torch.int64),
        "lengths": (lambda: X.lengths.tolist(), [1, 2, 0, 3]),
        "rows of a": (lambda: numbers_of(X["a"]), [[0], [1, 2]]),
        "rows of b": (lambda: numbers_of(X["b"]), [[], [3, 4, 5]]),
        "shared values": (lambda: X["b"].values is X.values, True),
        "a dict": (lambda: list(X.to_dict()), ["a", "b"]),
        "repr": (lambda: repr(X), "KeyedJaggedTensor(lengths={'a': [1, 2], 'b': [0, 3]}, torch.int64[6])"),
        "dtypes of weights and values": (
            lambda: (W.dtype, W.requires_grad, W.values.dtype),
            (torch.float32, True, torch.int64),
        ),
        "repr of weights": (lambda: repr(W).count("weighted"), 1),
        "weights of a": (lambda: W.feature_weights("a").to_dense().shape, (2, 3)),
        "no entries": (lambda: batch([0] * 4).shape, (2, 2, 0)),
        "no entries of a key": (lambda: batch([0, 0])["b"].to_dense().shape, (1, 0)),
        "no rows": (lambda: batch([]).shape, (2, 0, 0)),
        "no rows of a key": (lambda: batch([])["b"].to_dense().shape, (0, 0)),
    }
)


def test_weights_have_the_rows_of_their_feature_and_gradients():
    leaf = torch.rand(6, requires_grad=True)
    y = KeyedJaggedTensor(X.keys, X.values, X.lengths, weights=leaf)
    (y.feature_weights("a").sum(1) * y.feature_weights("b").sum(1)).sum().backward()
    expected = torch.cat([torch.tensor([0.0, 1, 1]) * leaf[3:].sum(), leaf[1:3].sum().expand(3)])
    torch.testing.assert_close(leaf.grad, expected.detach())


def test_entries_may_be_vectors_and_carry_gradients():
    values = torch.randn(6, 4, requires_grad=True)
    x = KeyedJaggedTensor(["a", "b"], values, torch.tensor([1, 2, 0, 3]))
    assert x.shape == (2, 2, 3, 4)
    (x["b"].sum(1) * 2).sum().backward()
    assert values.grad.equal(torch.tensor([0.0, 0, 0, 2, 2, 2]).unsqueeze(1).expand(6, 4))


def dtypes_of(x):
    return x.dtype, x.values.dtype, x.offsets.dtype


test_the_outer_dtype_is_that_of_the_weights = giving(
    {
        "weights": (
            lambda: (W.to(torch.float64).weights.dtype, *dtypes_of(W.to(torch.float64))),
            (torch.float64, torch.float64, torch.int64, torch.int64),
        ),
        "values": (lambda: dtypes_of(X.to(torch.int32)), (torch.int32, torch.int32, torch.int64)),
    }
)


# ---- other keys ------------------------------------------------------------------------------------------------


def rows_by_key(x):
    """The numbers and the weights of each row, by key."""
    return {key: (numbers_of(x[key]), numbers_of(x.feature_weights(key))) for key in x.keys}


ABC, D = batch([1, 2, 0, 3, 4, 1], "abc", weighted=True), batch([4, 1], "d", weighted=True)
ROWS = rows_by_key(ABC)
CA = ABC.permute(["c", "a"])
WEIGHTS = {key: ABC.feature_weights(key) for key in ABC.keys}
AGAIN = KeyedJaggedTensor.from_jagged(ABC.to_dict(), weights=WEIGHTS)
FEATURES = {k: JaggedTensor.from_tensors([torch.rand(n, 3) for n in (2, 0, 1)]) for k in "pq"}
OF_FEATURES = KeyedJaggedTensor.from_jagged(FEATURES)


def rows_of(keys):
    return {key: ROWS[key] for key in keys}


test_other_keys = giving(
    {
        "permute": (lambda: rows_by_key(CA), rows_of("ca")),
        "permute by place": (lambda: rows_by_key(ABC.permute([2, 1, -3])), rows_of("cba")),
        "keys of permute": (lambda: CA.keys, ("c", "a")),
        "lengths of permute": (lambda: CA.lengths.tolist(), [4, 1, 1, 2]),
        "values of permute": (lambda: CA.values is ABC.values, True),
        "split": (lambda: [rows_by_key(x) for x in ABC.split([1, 2])], [rows_of("a"), rows_of("bc")]),
        "keys of split": (lambda: [x.keys for x in ABC.split([1, 2])], [("a",), ("b", "c")]),
        "compact": (lambda: rows_by_key(CA.compact()), rows_of("ca")),
        "values of compact": (
            lambda: CA.compact().values.tolist(),
            ABC.values[[*range(6, 11), 0, 1, 2]].tolist(),
        ),
        **{
            f"{name} joins keys": (lambda join=join: rows_by_key(join([ABC, D])), ROWS | rows_by_key(D))
            for name, join in {"cat": KeyedJaggedTensor.cat, "torch.cat": torch.cat}.items()
        },
        "keys of cat": (lambda: torch.cat([D, ABC]).keys, ("d", "a", "b", "c")),
        "the longest row of cat": (lambda: torch.cat([ABC.permute(["a"]), D]).max_length, 4),
        "weights of cat": (
            lambda: torch.cat([ABC, D]).weights.tolist(),
            [*ABC.weights.tolist(), *D.weights.tolist()],
        ),
        "from_jagged": (lambda: rows_by_key(AGAIN), ROWS),
        "values of from_jagged": (lambda: AGAIN.values.tolist(), ABC.values.tolist()),
        "offsets of from_jagged": (lambda: AGAIN.offsets.tolist(), ABC.offsets.tolist()),
        "the size of vectors from_jagged": (lambda: OF_FEATURES.shape, (2, 3, 2, 3)),
        "vectors from_jagged": (
            lambda: {key: numbers_of(OF_FEATURES[key]) for key in "pq"},
            {key: numbers_of(x) for key, x in FEATURES.items()},
        ),
    }
)


# ---- compiled --------------------------------------------------------------------------------------------------

COMPILED = {
    "features": lambda x: x["a"].sum(1) * 2 + x["b"].sum(1),
    "permute": lambda x: x.permute(["b"])["b"].sum(1),
    "split": lambda x: x.split([1, 1])[1]["b"].sum(1),
    "torch.cat": lambda x: torch.cat([x.permute(["b"]), x.permute(["a"])])["b"].sum(1),
    "cat": lambda x: KeyedJaggedTensor.cat([x.permute(["b"]), x.permute(["a"])])["b"].sum(1),
    "from_jagged": lambda x: KeyedJaggedTensor.from_jagged({"b": x["a"], "c": x["b"]})["c"].sum(1),
    "made inside": lambda x: KeyedJaggedTensor(
        ["p", "q"], x.values, x.lengths, max_length=x.max_length
    )["q"].sum(1),
}  # fmt: skip


@pytest.mark.sweep(44)
@pytest.mark.parametrize("way", COMPILED_WAYS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_in_eager_mode(name, way):
    compiled = WAYS[way](COMPILED[name])
    for lengths in LENGTHS[:4]:
        x = batch(lengths)
        assert compiled(x).equal(COMPILED[name](x))
    if way == "desugar.compile":
        # An int that a function reads, `max_length` here, is a constant of the first program.
        assert len(compiled.programs) == (2 if name == "made inside" else 1)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", ["desugar.compile", "behind Dynamo"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_workers_run_one_program(way, workers):
    score, frames, is_ours = COMPILED["features"], CompileCounter(), way == "desugar.compile"
    compiled = WAYS[way](score) if is_ours else torch.compile(score, backend=frames, fullgraph=True)
    for x in torch.utils.data.DataLoader(
        [batch(n) for n in LENGTHS[:4]], batch_size=None, num_workers=workers
    ):
        assert compiled(x).equal(score(x))
    assert (len(compiled.programs) if is_ours else frames.frame_count) == 1


test_what_comes_back_is_keyed = giving(
    {
        "permute": (
            lambda: (lambda y: (y.keys, y["a"].to_dense().equal(W["a"].to_dense())))(
                WAYS["desugar.compile"](lambda x: x.permute(["b", "a"]))(W)
            ),
            (("b", "a"), True),
        )
    }
)


def whole(*lengths):
    return JaggedTensor(torch.arange(6), torch.tensor([0, 3, 6]), lengths=torch.tensor(lengths), max_length=3)


BAG = torch.nn.EmbeddingBag(9, 3, mode="sum")
# A function, arguments that it takes, and arguments that it refuses.
REFUSED = {
    "gaps between rows": (
        lambda x: KeyedJaggedTensor.from_jagged({"c": x})["c"].sum(1),
        (whole(3, 3),),
        (whole(3, 2),),
        "expected rows back to back",
    ),
    "weights of other rows": (
        lambda x, w: BAG(x, per_sample_weights=w),
        (W["a"], W.feature_weights("a")),
        (W["a"], W.feature_weights("b")),
        "rows of other lengths",
    ),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_graphs_too(name, way):
    function, taken, refused, text = REFUSED[name]
    run = WAYS[way](function)
    torch.testing.assert_close(run(*taken), function(*taken))
    with pytest.raises((ValueError, RuntimeError), match=text):
        run(*refused)


# ---- the conformance kit ---------------------------------------------------------------------------------------


def _make(lengths=(1, 2, 0, 3, 1, 1), keys="abc"):
    total = sum(lengths)
    weights = torch.rand(total)
    return KeyedJaggedTensor(
        list(keys), torch.randint(0, 9, (total,)), torch.tensor(lengths), weights=weights
    )


TestConformance = suite(
    _make,
    construct=lambda values, offsets, weights: KeyedJaggedTensor(
        list("abc"), values, offsets.diff(dim=1).flatten(), weights=weights, max_length=3
    ),
    reference=lambda x: torch.stack([x.feature_weights(key).to_dense() for key in x.keys]),
    sizes=[lambda: _make((2, 2, 0, 3, 1, 1)), lambda: _make((0, 0, 0, 0, 3, 3, 1, 1, 1))],
    variants=[lambda: _make(keys="abd")],
    ops={torch.ops.aten._to_copy.default: lambda x: (x,), torch.cat: lambda x: ([x],)},
)
