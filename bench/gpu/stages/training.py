"""A training step of one transformer layer and its loss on rows of uneven length, beside five ways to do it by hand.

The loss is a scalar and the step calls `.backward()`, as a training loop does. Lengths are drawn as instructions and
answers have them: most rows are short, a few are as long as the longest. All subjects have the same weights and rows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.device import Call
from bench.gpu.run import Run, Turns
from bench.gpu.stages.attention import CUDNN, FLASH, attend_flat
from bench.gpu.stages.model import nested_block, uneven_lengths

VARLEN = {"varlen by hand, flash, torch.compile": FLASH, "varlen by hand, cuDNN, torch.compile": CUDNN}
BY_HAND, BY_HAND_CUDNN = VARLEN
JAGGED, RECORDED = "JaggedTensor, desugar.compile", "JaggedTensor, desugar.record"
BY_HAND_RECORDED = "varlen by hand, flash, recorded as a CUDA graph"
FLEX, DENSE = "FlexAttention, torch.compile", "dense table, torch.compile"
NESTED = "torch.nested, torch.compile"
CLASSES, TOKENS = 256, "tokens"


@dataclass(frozen=True)
class Case:
    """A width and a number of tokens."""

    dim: int
    heads: int
    lengths: tuple[int, ...]

    @property
    def group(self) -> str:
        return f"training, {self.dim} wide, {sum(self.lengths):,} tokens, longest {max(self.lengths):,}"


def drawn_lengths(tokens: int, longest: int) -> tuple[int, ...]:
    """Returns lengths that add up to `tokens`: a log-normal distribution with a median of an eighth of the longest."""
    rng, lengths = random.Random(0), [longest]
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, longest, max(1, round(longest / 8 * rng.lognormvariate(0, 1)))))
    return tuple(lengths)


def make_cases(run: Run) -> tuple[Case, ...]:
    """Returns the cases, the most important one first."""
    many = drawn_lengths(32768, 4096)
    real = (
        Case(2048, 16, many),
        Case(1024, 16, tuple(uneven_lengths(0.25, 512, 32))),
        Case(4096, 32, many),
        Case(4096, 32, drawn_lengths(65536, 4096)),
    )
    return run.device.pick(real, (Case(16, 2, (5, 3, 12)),))


class Layer(nn.Module):
    """A block of the demo's model, and the loss of its classes."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        from examples._language_model import Block

        self.block, self.head = Block(dim, heads), nn.Linear(dim, CLASSES)

    def forward(self, x: Any, targets: Any) -> Tensor:
        return F.cross_entropy(self.head(self.block(x)).flatten(0, 1), targets.flatten(0, 1))


# ---------------------------------------------------------------------------------------------------------
# by hand
# ---------------------------------------------------------------------------------------------------------


def flat_loss(layer: Any, attend: Callable[..., Tensor], x: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss over rows back to back, `[total, D]`; `attend` gets queries, keys and values by heads."""
    block = layer.block
    parts = block.qkv(block.norm1(x)).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (block.heads, -1)) for part in parts)
    x = x + block.out(attend(q, k, v).flatten(1))
    x = x + block.down(F.gelu(block.up(block.norm2(x))))
    return F.cross_entropy(layer.head(x), targets)


def flex_attend(run: Run, offsets: Tensor, total: int) -> Callable[..., Tensor]:
    """Returns FlexAttention under a mask of rows; the mask is made once, outside of the step."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = torch.repeat_interleave(offsets.diff())

    def in_row(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (rows[query] == rows[key]) & (query >= key)

    make_mask = run.device.compile(
        torch.compile, create_block_mask
    )  # uncompiled it makes tables of total * total
    mask = make_mask(in_row, None, None, total, total, device=offsets.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head: Any = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out: Any = flex_attention(*by_head, block_mask=mask)
        return out.squeeze(0).transpose(0, 1)

    return attend


def nested_loss(layer: Any, x: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(layer.head(nested_block(layer.block, x)).values(), targets)


# ---------------------------------------------------------------------------------------------------------
# subjects
# ---------------------------------------------------------------------------------------------------------


class Problem:
    """The weights, rows and classes of a case, which all subjects share, and the loss that each must compute."""

    def __init__(self, run: Run, case: Case) -> None:
        device, dtype = run.device.name, run.device.pick(torch.bfloat16, torch.float32)
        torch.manual_seed(0)
        self.case, self.longest = case, max(case.lengths)
        self.layer = Layer(case.dim, case.heads).to(device, dtype)
        self.rows = [torch.randn(n, case.dim, device=device, dtype=dtype) for n in case.lengths]
        self.answers = [torch.randint(CLASSES, (n,), device=device) for n in case.lengths]
        starts = [*accumulate(case.lengths, initial=0)]
        self.offsets = torch.tensor(starts, dtype=torch.int32, device=device)

    @cached_property
    def loss(self) -> Tensor:
        """The loss, of each row alone."""
        rows = zip(self.rows, self.answers, strict=True)
        with torch.no_grad():
            losses = [self.layer(x[None], t[None]).float() * len(x) for x, t in rows]
        return torch.stack(losses).sum() / sum(self.case.lengths)

    def flat(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.rows), torch.cat(self.answers)

    def attend(self, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_flat(kernel, q, k, v, self.offsets, self.longest)


def make_loss(run: Run, name: str, problem: Problem) -> tuple[nn.Module, Call]:
    """Returns a layer and a function that computes its loss."""
    layer, compiler = copy.deepcopy(problem.layer), torch.compile
    fn: Any = layer
    batch: tuple[Any, ...]
    if name == DENSE:
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        batch = pad(problem.rows), pad(problem.answers, padding_value=-100)
    elif name == NESTED:
        fn = partial(nested_loss, layer)
        batch = torch.nested.nested_tensor(problem.rows, layout=torch.jagged), problem.flat()[1]
    elif name == JAGGED:
        import desugar
        from subclasses.ragged import JaggedTensor

        x = JaggedTensor.from_tensors(problem.rows)
        batch = x, JaggedTensor(problem.flat()[1], x.offsets, max_length=x.shape[1])
        compiler = desugar.compile
    else:
        attend = partial(problem.attend, VARLEN.get(name, FLASH))
        batch = problem.flat()
        if name == FLEX:
            attend = flex_attend(run, problem.offsets, len(batch[0]))
        fn = partial(flat_loss, layer, attend)
    loss_of = run.device.compile(compiler, fn)
    return layer, lambda: loss_of(*batch)


def make_step(run: Run, name: str, problem: Problem) -> Call:
    """Returns forward and backward; gradients are replaced, not added up.

    Raises:
        AssertionError: The loss differs from the loss over each row alone.
    """
    if name == RECORDED:
        import desugar

        return desugar.record(make_step(run, JAGGED, problem))
    layer, loss_of = make_loss(run, name, problem)
    parameters = list(layer.parameters())

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = loss_of()
        loss.backward()
        return loss.detach()

    torch.testing.assert_close(step().float(), problem.loss, rtol=2e-2, atol=2e-2)
    return run.device.record([step]) if name == BY_HAND_RECORDED else step


def measure_training(run: Run, cases: Sequence[Case] | None = None) -> None:
    """Times a step of each subject, with the host's time and the peak memory."""
    names = [BY_HAND, BY_HAND_CUDNN, JAGGED, RECORDED, BY_HAND_RECORDED, FLEX, DENSE, NESTED]
    uncaptured = tuple(name for name in names if name not in (RECORDED, BY_HAND_RECORDED))
    cases = cases or make_cases(run)
    for case in cases if run.shard is None else cases[:3]:  # the last one would take the memory of the others
        torch.compiler.reset()
        problem = Problem(run, case)
        makers = {name: partial(make_step, run, name, problem) for name in names}
        turns = Turns(BY_HAND, host=True, peak=uncaptured, rounds=20, seconds=6.0)
        if run.compare(case.group, makers, turns):
            run.number(case.group, BY_HAND, TOKENS, sum(case.lengths), "a step")
