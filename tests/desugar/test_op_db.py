"""PyTorch's own op database through desugar: each op on pairs, forward and backward, as eager mode has it."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

from subclasses.testing.op_infos import closing_samples
from tests.desugar.classes import Pair, metadata, plain_parts
from tests.desugar.judge import by_pass, leaves_of, random_like, tensors_of

# ---- the ops -------------------------------------------------------------------------------------------------

# Ops whose results have undefined values.
UNDEFINED = frozenset("empty empty_like new_empty new_empty_strided empty_strided empty_permuted".split())
# One of each kind, for the normal run: the others are slow tests.
CHOSEN = frozenset(
    "add sub mul div.no_rounding_mode pow sin exp sigmoid abs clamp where lerp addcmul eq logical_and floor isnan "
    "sum mean prod var amax argmax cumsum logsumexp softmax sort topk median norm std_mean "
    "matmul bmm addmm einsum dot linalg.inv linalg.solve linalg.svd linalg.norm linalg.det linalg.lu_factor_ex "
    "view reshape transpose permute expand squeeze narrow select split chunk unbind unfold diagonal "
    "as_strided cat stack gather index_select scatter index_put masked_fill roll flip tril "
    "nn.functional.linear nn.functional.conv2d nn.functional.layer_norm nn.functional.batch_norm "
    "nn.functional.dropout nn.functional.gelu nn.functional.cross_entropy nn.functional.max_pool2d "
    "nn.functional.interpolate.bilinear nn.functional.embedding nn.functional.scaled_dot_product_attention "
    "fft.fft complex to clone zeros_like rand_like bernoulli normal item nonzero empty_like".split()
)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = [
    pytest.param(op, id=name_of(op), marks=[] if name_of(op) in CHOSEN else [pytest.mark.slow])
    for op in op_db
    # The first are for GPUs, and desugar refuses the other, which PyTorch decomposes wrongly.
    if op.dtypes and not op.name.startswith(("jiterator", "nn.functional.multilabel_margin_loss"))
]


# ---- one op --------------------------------------------------------------------------------------------------


def paired(leaf: Any, grad: bool) -> Any:
    """A tensor as a pair of it and itself; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    pair = Pair(leaf.detach().clone(), leaf.detach().clone())
    return pair.requires_grad_() if grad and leaf.dtype.is_floating_point else pair


def play(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Results and gradients, random numbers from one seed."""
    torch.manual_seed(5)
    result = fn(*args, **kwargs)
    outs, leaves = ([t for t in tensors_of(value) if t.requires_grad] for value in (result, (args, kwargs)))
    if not outs:
        return leaves_of(result), []
    generator = torch.Generator().manual_seed(1)
    tangents = [random_like(out, generator) for out in outs]
    return leaves_of(result), list(torch.autograd.grad(outs, leaves, tangents, allow_unused=True))


def assert_alike(got: Any, want: Any, defined: bool) -> None:
    if not isinstance(want, Tensor):
        assert got == want or got != got
        return
    assert metadata(got) == metadata(want)
    assert (got.shape, got.dtype, got.requires_grad) == (want.shape, want.dtype, want.requires_grad)
    if defined:
        parts = (
            [p.float() if p.is_floating_point() and p.itemsize == 1 else p for p in plain_parts(x)]
            for x in (got, want)
        )
        torch.testing.assert_close(*parts, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")  # some layouts are in beta, and some ops deprecated
@pytest.mark.parametrize("op", OPS)
def test_op(op, monkeypatch):
    # The database seeds within some of its functions, which is a side effect and happens in the trace.
    monkeypatch.setattr(
        common_methods_invocations, "wrapper_set_seed", lambda fn, *args, **kwargs: fn(*args, **kwargs)
    )
    dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
    grad = op.supports_autograd and dtype.is_floating_point
    with closing_samples(op, dtype) as samples:
        sample = next(samples, None)
    if sample is None:
        pytest.skip("the database has no sample for it")

    def arguments():
        tree = ((sample.input, *sample.args), sample.kwargs)
        return optree.tree_map(lambda leaf: paired(leaf, grad), tree, none_is_leaf=True)

    fn = lambda *args, **kwargs: op.op(*args, **kwargs)  # noqa: E731
    try:
        wanted = play(fn, *arguments())
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        pytest.skip(f"eager mode does not support it on pairs: {str(error)[:80]}")
    for got, want in zip(play(by_pass(fn), *arguments()), wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            assert_alike(one, other, name_of(op) not in UNDEFINED)


def test_the_chosen_ops_and_the_exceptions_exist():
    names = {name_of(op) for op in op_db}
    assert names >= CHOSEN, sorted(CHOSEN - names)
    assert names >= UNDEFINED
