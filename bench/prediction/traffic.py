"""Counts the bytes and the arithmetic of a kernel from the nodes of Inductor's scheduler that it fuses.

The count assumes perfect caches: a kernel moves each buffer among its arguments once, and only the part of the buffer
that its indices reach. An index that depends on data (an embedding) counts as one access
for each point of the loop. Values that live in registers, because producer and consumer are fused, count nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.prediction import _torch as private

Bytes = dict[torch.dtype, int]

# Of the ops in a loop's body, those that compute nothing.
_NO_ARITHMETIC = frozenset(
    "load store store_reduction partial_accumulate index_expr constant to_dtype to_dtype_bitcast masked get_index "
    "indirect_indexing check_bounds device_assert_async load_seed set_indirect0 identity output placeholder "
    "bucketize".split()
)


@dataclass(frozen=True)
class Traffic:
    """The bytes and the arithmetic of one launch of a kernel.

    Attributes:
        ops: The names of the graph's ops whose work it does.
        reads: Bytes by dtype.
        writes: Bytes by dtype.
        flops: Arithmetic operations, one for each op of the loop's body at each point.
    """

    ops: tuple[str, ...]
    reads: Bytes = field(default_factory=dict)
    writes: Bytes = field(default_factory=dict)
    flops: int = 0


# ------------------------------------------------------------------------------------------ Inductor's kernels


def count_kernel(nodes: Iterable[Any], kernel_args: Iterable[Any]) -> Traffic:
    """Counts a kernel.

    Args:
        nodes: The scheduler's nodes that it fuses; markers between them are skipped.
        kernel_args: Inductor's arguments of the kernel, or of each kernel in a combined one.
    """
    parts = [part for node in nodes for part in _parts(node)]
    read, written = _accesses(parts, "reads"), _accesses(parts, "writes")
    taken: Counter[torch.dtype] = Counter()
    given: Counter[torch.dtype] = Counter()
    for args in kernel_args:
        for name in args.input_buffers:
            _add(taken, name, read)
        for name, argument in args.output_buffers.items():
            if not isinstance(argument, private.RemovedArg):
                _add(given, name, written)
        for names in _in_place(args):
            for name in names:
                _add(taken, name, read)
                _add(given, name, written)
    return Traffic(_ops_of(parts), dict(taken), dict(given), sum(map(_arithmetic, parts)))


def _parts(node: Any) -> Iterator[Any]:
    """Yields the nodes of a fused node."""
    if hasattr(node, "get_nodes"):
        yield from (part for part in node.get_nodes() if isinstance(part, private.SchedulerNode))


def _in_place(args: Any) -> list[tuple[str, ...]]:
    """Returns the names of each buffer that a kernel overwrites: before and after."""
    names = {
        tuple(buffer.other_names)
        for buffer in args.inplace_buffers.values()
        if not isinstance(buffer, private.RemovedArg)
    }
    return sorted(names)


def _accesses(parts: list[Any], kind: str) -> dict[str, dict[Any, int | None]]:
    """Returns, for each buffer, the entries that each of its indices reaches; None means all of them."""
    real = private.V.graph.scheduler.mutation_real_name
    accesses: dict[str, dict[Any, int | None]] = {}
    for node in parts:
        for dep in getattr(node.read_writes, kind):
            indexed = isinstance(dep, private.MemoryDep)
            key = (dep.index, dep.size) if indexed else None
            reached = accesses.setdefault(real.get(dep.name, dep.name), {})
            reached[key] = _reached(dep) if indexed else None
            accesses.setdefault(dep.name, reached)
    return accesses


def _reached(dep: Any) -> int:
    """Returns the number of entries that an index reaches; a dimension that it does not vary in counts once."""
    symbols = set(dep.index.free_symbols)
    indirect = dep.is_indirect()
    sizes = (size for name, size in zip(dep.var_names, dep.size, strict=True) if indirect or name in symbols)
    return math.prod(map(as_int, sizes))


def _add(total: Counter[torch.dtype], name: str, accesses: dict[str, dict[Any, int | None]]) -> None:
    """Adds the bytes of a buffer; nothing if the kernel does not access it in this way."""
    reached = accesses.get(name)
    if not reached:
        return
    graph = private.V.graph
    numel = as_int(graph.get_numel(name))
    entries = numel if None in reached.values() else min(numel, sum(filter(None, reached.values())))
    dtype = graph.get_dtype(name)
    total[dtype] += entries * dtype.itemsize


def as_int(extent: Any) -> int:
    """Returns the value that an expression over sizes had in the traced call; 64 for one that depends on data."""
    if isinstance(extent, int):
        return extent
    sizes = private.V.graph.sizevars
    hint = getattr(sizes, "optimization_hint", None) or sizes.size_hint  # the older name
    return int(hint(extent, fallback=64))


def _ops_of(parts: list[Any]) -> tuple[str, ...]:
    """Returns the names of the graph's nodes behind the scheduler's nodes, in the order of the graph."""
    origins = {origin for node in parts if node.node is not None for origin in node.node.origins}
    order = {node: number for number, node in enumerate(private.V.graph.graph.nodes)}
    return tuple(
        node.name for node in sorted(origins, key=lambda node: (order.get(node, len(order)), node.name))
    )


def _arithmetic(node: Any) -> int:
    """Returns the number of arithmetic operations of a loop nest."""
    body = getattr(node, "_body", None)
    if body is None:
        return 0
    counts = getattr(body, "op_counts", {})
    each = sum(
        count
        for op, count in counts.items()
        if op not in _NO_ARITHMETIC and not op.startswith(("get_index", "set_", "masked_subblock"))
    )
    each += counts.get("store_reduction", 0)  # one operation of the reduction for each point
    return each * math.prod(as_int(size) for sizes in node.get_ranges() for size in sizes)


# ------------------------------------------------------------------------------------------------ library calls

# Ops that read of their first operand no more than they return.
_GATHERING = frozenset(
    f"aten::{name}"
    for name in ("embedding", "index", "index_select", "gather", "_unsafe_index", "slice_copy")
)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for part in value.values() for tensor in tensors_in(part))
    elif isinstance(value, list | tuple):
        yield from (tensor for part in value for tensor in tensors_in(part))


def nbytes(x: Tensor) -> int:
    """Returns the bytes of a tensor's entries; a dimension of stride 0 counts once."""
    extents = [
        extent if stride else min(extent, 1) for extent, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return math.prod(extents) * x.element_size()


def count_call(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Traffic:
    """Counts an op that a library runs, from its operands and results."""
    results = list(tensors_in(result))
    given: Counter[torch.dtype] = Counter()
    for x in _unique(results):
        given[x.dtype] += nbytes(x)
    written = {id(x) for x in results}
    taken: Counter[torch.dtype] = Counter()
    operands = [
        x for x in _unique(list(tensors_in((args, kwargs)))) if id(x) not in written or _reads_result(func)
    ]
    gathers = func._schema.name in _GATHERING
    for number, x in enumerate(operands):
        taken[x.dtype] += min(nbytes(x), sum(given.values())) if gathers and number == 0 else nbytes(x)
    return Traffic((str(func),), dict(taken), dict(given), count_flops(func, args, kwargs, result))


def _reads_result(func: Any) -> bool:
    """Whether an op changes an operand that it also reads, such as `add_`; an `out=` is written alone."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
        for argument in func._schema.arguments
    )


def _unique(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def count_flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Returns the arithmetic operations of an op: PyTorch's formula, ours where it has none, or one for each result."""
    name = func._schema.name.removeprefix("aten::")
    if name in _RAGGED_ATTENTION:
        return _ragged_attention_flops(func, args, kwargs)
    if name == "_int_mm":
        return 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
    formula = private.flop_registry.get(func._overloadpacket)
    if formula is not None:
        options = {key: value for key, value in kwargs.items() if key != "out"}
        return int(formula(*args, **options, out_val=result))
    return sum(x.numel() for x in tensors_in(result))


# Attention over rows of any lengths: matrix products of a forward and of a backward, which computes the scores anew.
_RAGGED_ATTENTION = {
    "_flash_attention_forward": 2,
    "_efficient_attention_forward": 2,
    "_flash_attention_backward": 5,
    "_efficient_attention_backward": 5,
}


def _ragged_attention_flops(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Returns an upper bound: every query of a row sees as many keys as the longest row has, half if it is causal.

    The lengths of the rows are data, which no fake tensor has; the longest one is an argument.
    """
    given = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    } | kwargs
    query, value = given["query"], given["value"]
    heads, width = query.shape[-2], query.shape[-1] + value.shape[-1]
    queries = math.prod(query.shape[:-2])
    longest = given.get("max_k", given.get("max_seqlen_k"))
    longest = value.shape[-3] if longest is None else longest
    causal = given.get("is_causal") or given.get("custom_mask_type", 0)
    pairs = queries * int(longest) * heads / (2 if causal else 1)
    products = _RAGGED_ATTENTION[func._schema.name.removeprefix("aten::")]
    return int(pairs * width * products)
