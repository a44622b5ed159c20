"""PyTorch's own op database for `torch.nested`, for both ragged layouts, with its loop over the rows as judge.

Each sample's nested tensors become ragged ones, which share their offsets or lengths if the nested tensors do. Memory
outside of the rows holds NaN, or an index out of range. A sample counts when the database's reference works on it and
supports holes. The references for reductions over the whole batch do not.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.opinfo.definitions.nested import njt_op_db
from torch.utils import _pytree as pytree

import desugar
from subclasses.ragged import JaggedTensor, PaddedTensor

OPS = [op for op in njt_op_db if op.supports_njt and torch.float32 in op.dtypes]

# Their derivatives are zeros, which PyTorch makes dense of the outer size.
DENSE_ZEROS = ("copysign", "nextafter", "sgn")
RANDOM = "empty bernoulli rand normal dropout rrelu uniform exponential cauchy geometric".split()
# The database seeds the generator inside these, which a compiled function refuses.
UNSEEDED = {"nn.functional.rrelu": torch.nn.functional.rrelu}
# Errors of the database's references on a sample that they do not support.
REFERENCE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    NotImplementedError,
    AssertionError,
    StopIteration,
)

# ---- layouts ---------------------------------------------------------------------------------------------------


def make_jagged(nested: Tensor, place: int, once: Callable[[Tensor | None], Any]) -> JaggedTensor:
    """The rows of a nested tensor back to back; its values are shared."""
    offsets, lengths = once(nested.offsets()), once(nested.lengths())  # type: ignore[attr-defined]
    return JaggedTensor(nested.detach().values(), offsets, lengths=lengths, ragged_dim=place)


def make_padded(nested: Tensor, place: int, once: Callable[[Tensor | None], Any]) -> PaddedTensor:
    """The rows of a nested tensor in a table two places wider than the longest, with poison in the padding."""
    rows = nested.detach().unbind()
    lengths = nested.lengths()  # type: ignore[attr-defined]
    lengths = once(nested.offsets()).diff() if lengths is None else once(lengths)  # type: ignore[attr-defined]
    size = [len(rows), *rows[0].shape] if rows else [0, *nested.shape[1:]]
    size[place] = max((row.shape[place - 1] for row in rows), default=0) + 2
    table = torch.full(size, poison(nested.dtype), dtype=nested.dtype)
    for to, row in zip(table, rows, strict=True):
        to.narrow(place - 1, 0, row.shape[place - 1]).copy_(row)
    return PaddedTensor(table, once(lengths), ragged_dim=place)


def poison(dtype: torch.dtype) -> float | int | bool:
    """A value that shows in a result if an op reads it: NaN, or an index out of range."""
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max // 2


def make_counted(nested: Tensor, place: int, once: Callable[[Tensor | None], Any]) -> JaggedTensor:
    """The rows of a nested tensor and two spare ones, the first with an entry of poison."""
    x = make_jagged(nested, place, once)
    tail = torch.full_like(x.values.narrow(place - 1, 0, 1), poison(x.dtype))
    values, lengths = torch.cat([x.values, tail], place - 1), x.lengths
    offsets = torch.cat([x.offsets, torch.tensor([values.shape[place - 1]] * 2)])
    rows = {
        "lengths": None if lengths is None else once(F.pad(lengths, [0, 2])),
        "count": once(torch.tensor(len(x))),
    }
    return JaggedTensor(values, once(offsets), **rows, ragged_dim=place)  # type: ignore[arg-type]


def has_operand_of_rows(sample: Any) -> bool:
    """Whether a dense operand has an extent for the rows, and none for spare ones."""
    parts = [
        t for t in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)
    ]
    rows = [len(t.offsets()) - 1 for t in parts if t.is_nested]  # type: ignore[attr-defined]
    return any(not t.is_nested and t.dim() > 1 and t.shape[0] in rows for t in parts)


LAYOUTS: dict[str, Callable[..., Any]] = {
    "jagged": make_jagged,
    "padded": make_padded,
    "counted": make_counted,
}

# ---- samples ---------------------------------------------------------------------------------------------------


def converted(sample: Any, make: Callable[..., Any]) -> SimpleNamespace:
    """A sample with its nested tensors as ragged ones; equal offsets stay one tensor."""
    known: dict[Any, Any] = {}

    def once(t: Tensor | None) -> Tensor | None:
        """The same tensor for the same numbers, which proves that rows match."""
        return None if t is None else known.setdefault(str(t.tolist()), t.to(torch.int64))

    def ragged(t: Any) -> Any:
        if not (isinstance(t, Tensor) and t.is_nested):
            return t
        if id(t) not in known:
            place = next(d for d, n in enumerate(t.shape) if d and not isinstance(n, int))
            known[id(t)] = make(t, place, once).requires_grad_(t.requires_grad)
        return known[id(t)]

    parts = {name: pytree.tree_map(ragged, getattr(sample, name)) for name in ("input", "args", "kwargs")}
    return SimpleNamespace(**parts)


def samples_of(op: Any) -> list[tuple[Any, list[Any]]]:
    """Samples, each with the results of the reference."""
    found = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
        whole = any(words in sample.name for words in ("full reduction", "batch+ragged", "all dim"))
        if "holes" in sample.name and whole:
            continue
        try:
            found.append((sample, parts_of(op.ref(op, sample))))
        except REFERENCE_ERRORS:
            continue  # the reference does not work on this sample
    return found


def parts_of(result: Any) -> list[Any]:
    """Rows, dense tensors and numbers of a result."""
    parts: list[Any] = []
    for part in pytree.tree_leaves(result):
        if isinstance(part, JaggedTensor | PaddedTensor):
            parts += [torch.cat(part.to_tensors())] if part.merged else part.to_tensors()
        elif isinstance(part, Tensor) and part.is_nested:
            parts += part.unbind()
        else:
            parts.append(part)
    return parts


def alike(got: list[Any], expected: list[Any]) -> list[Any]:
    """A dense result of one entry for each row in as many parts as the reference's."""
    dense = len(got) == 1 and isinstance(got[0], Tensor) and got[0].dim() > 0
    return list(got[0]) if dense and len(got[0]) == len(expected) > 1 else got


def biased(sample: Any) -> tuple[Any, Tensor] | None:
    """A sample whose every row has a bias added, and the bias; None if the sample has no such form."""
    x = sample.input
    if not (isinstance(x, Tensor) and x.is_nested and x.requires_grad and x.is_floating_point()):
        return None
    rows = x.detach().unbind()
    if isinstance(x.shape[1], int):
        return None  # a nested tensor made of rows is ragged along 1
    bias = torch.randn(rows[0].shape[1:], dtype=x.dtype, requires_grad=True)
    ours = copy.copy(sample)
    ours.input = torch.nested.as_nested_tensor([row + bias for row in rows], layout=torch.jagged)
    if hasattr(x, "_ndim"):  # by which the reference counts the dimensions of tensors that it unsqueezes
        ours.input._ndim = x._ndim
    return ours, bias


# ---- judging ---------------------------------------------------------------------------------------------------


def run_eager(op: Any, c: Any) -> Any:
    """The op itself."""
    return op.op(c.input, *c.args, **c.kwargs)


def run_compiled(op: Any, c: Any) -> Any:
    """The op through desugar."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        return desugar.compile(UNSEEDED.get(op.name, op.op), backend="eager")(c.input, *c.args, **c.kwargs)


def check_values(op: Any, got: list[Any], expected: list[Any]) -> None:
    """Raises unless results equal the reference's; random ones need the same parts only."""
    assert len(got) == len(expected)
    if not any(name in op.name for name in RANDOM):
        torch.testing.assert_close(got, expected, equal_nan=True, atol=1e-4, rtol=1e-4)


def grads_of(leaves: list[Tensor], results: list[Any], **options: Any) -> Any:
    """The gradients of leaves by those results that have one."""
    outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    ones = [torch.ones_like(t) for t in outputs]
    return torch.autograd.grad(outputs, leaves, ones, allow_unused=True, **options)


def leaves_of(sample: Any) -> list[Tensor]:
    """The tensors of a sample that have gradients."""
    parts = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [t for t in parts if isinstance(t, Tensor) and t.requires_grad]


def expected_grads(op: Any, sample: Any, expected: list[Any]) -> Any:
    """The reference's gradients; None where it has no derivative."""
    if any(name in op.name for name in RANDOM) or not any(
        isinstance(t, Tensor) and t.requires_grad for t in expected
    ):
        return None
    try:
        return grads_of(leaves_of(sample), expected)
    except (RuntimeError, ValueError, NotImplementedError):
        return None


def check_grads(op: Any, ours: Any, theirs: Any) -> None:
    """Raises unless gradients equal the reference's."""
    for expected, got in zip(theirs, ours, strict=True):
        if op.name in DENSE_ZEROS and type(got) is Tensor and expected.is_nested:
            assert not got.any()
        elif expected is None or got is None:
            assert all(g is None or not any(p.any() for p in parts_of(g)) for g in (expected, got))
        else:
            torch.testing.assert_close(
                parts_of(got), parts_of(expected), equal_nan=True, atol=1e-4, rtol=1e-4
            )


# ---- counting --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def noted(errors: list[str]) -> Iterator[None]:
    """Adds the first line of the error that a block raises, or an empty one."""
    errors.append("")
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever is wrong, it is counted and shown
        errors[-1] = f"{type(error).__name__}: {error}".splitlines()[0]


def count(op: Any, layout: str, run: Any = run_eager, stride: int = 1) -> tuple[list[str], list[str]]:
    """The errors of an op's samples, forward and backward; only compared gradients add a second one."""
    forward, backward = [], []
    samples = [s for s in samples_of(op) if layout != "counted" or not has_operand_of_rows(s[0])]
    for sample, expected in samples[::stride]:
        theirs = expected_grads(op, sample, expected)
        with noted(forward):
            ours = converted(sample, LAYOUTS[layout])
            got = alike(parts_of(run(op, ours)), expected)
            check_values(op, got, expected)
        if theirs is not None:
            with noted(backward):
                assert not forward[-1], forward[-1]
                check_grads(op, grads_of(leaves_of(ours), got), theirs)
    return forward, backward
