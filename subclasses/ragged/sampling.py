"""Batches of about equally many tokens for the ranks of a data-parallel job.

A *step* is the rows of one batch of all ranks together. Steps are filled row by row in the order of the epoch. They do
not depend on the number of ranks, except with `rows_per_rank`. The rows of each step are then assigned to ranks,
longest first. Each row goes to the rank with the fewest tokens so far (Graham, "Bounds on Multiprocessing Timing
Anomalies", 1969). Every rank computes the same plan from the lengths and the seed, without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

Step = list[int]

# ---- the sampler -----------------------------------------------------------------------------------------------


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of row numbers for one rank; in each step all ranks get about equally many tokens.

    In an epoch every row is in one batch of one rank (but see ``drop_last``), and all ranks have the same number of
    batches. No batch is empty. The tokens of two ranks in a step differ by no more than the shortest row of the rank
    with more tokens. The rows of a step do not depend on the number of ranks (but see ``drop_last`` and
    ``rows_per_rank``). So a job may resume with another number of ranks. Call `set_epoch` before each epoch, or every
    epoch has the order of the first.

    It is a ``batch_sampler``::

        sampler = TokenBatchSampler([len(row) for row in rows], tokens_per_step=8192)
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=JaggedTensor.from_tensors)

    Args:
        lengths: ``[rows]``, the number of tokens of each row: a list of ints, or a tensor of an integer dtype.
        tokens_per_step: the budget of a step, in tokens of all ranks together. With one rank it is the budget of a
            batch. A step ends where the next row would exceed it. No row may be longer than a rank's share,
            ``tokens_per_step // num_replicas``. So no rank gets more than two shares, and every step but the last has
            a row for each rank.
        rows_per_step: the rows of a step, of all ranks together; given instead of ``tokens_per_step``.
        rows_per_rank: the most rows of a batch; given beside ``tokens_per_step``. No batch then exceeds these rows or
            a rank's share of the tokens. ``JaggedTensor.pack`` accepts a batch of these budgets; its ``rows`` include
            one for each ``longest`` tokens of the tail.
        num_replicas: the number of ranks. None: the size of the default process group, or 1 without a group. Give 1
            where another library deals batches to the processes, as accelerate does.
        rank: the index of this rank, from 0; given together with ``num_replicas``.
        shuffle: whether each epoch has another order, by ``seed + epoch``. False: steps follow the order of
            ``lengths``, and within a batch the longest row is first.
        seed: the same on all ranks.
        drop_last: drops the last step unless its tokens, or its rows, equal the budget exactly. Otherwise a last
            step with fewer rows than ranks takes the last rows of the step before. If that step has too few rows,
            the two become one, which may exceed ``tokens_per_step`` or ``rows_per_step``. With ``rows_per_rank`` it
            takes rows of the step before in its turn.

    Raises:
        TypeError: ``lengths`` are not integers.
        ValueError: a length is negative or more than a rank's share, or there are more ranks than rows. Both or none of
            the budgets are given, or ``rank`` is none of the ranks. Or an epoch has too few rows for all ranks to have
            one in each step within ``rows_per_rank``.
    """

    def __init__(  # noqa: PLR0913 - the arguments of `torch.utils.data.DistributedSampler`, and two budgets
        self,
        lengths: Sequence[int] | Tensor,
        *,
        tokens_per_step: int | None = None,
        rows_per_step: int | None = None,
        rows_per_rank: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.lengths = _as_ints(lengths)
        self.num_replicas, self.rank = _replicas_and_rank(num_replicas, rank)
        self.tokens_per_step, self.rows_per_step = tokens_per_step, rows_per_step
        self.rows_per_rank = rows_per_rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.start = 0
        self._steps: list[Step] | None = None
        _check_budget(self)

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Sets the next epoch, and the step that it begins with.

        Args:
            epoch: from 0; the order of the rows depends on it.
            start: how many steps are skipped, for a job that resumes within an epoch. Their rows are not loaded.

        Raises:
            ValueError: an argument is negative, or the epoch has fewer steps than ``start``.
        """
        if epoch < 0:
            raise ValueError(f"set_epoch: expected an epoch of at least 0, got {epoch}")
        self.epoch, self.start, self._steps = epoch, 0, None
        if not 0 <= start <= len(self):
            raise ValueError(
                f"set_epoch: expected a start from 0 to {len(self)}, the number of steps of epoch {epoch}, got {start}"
            )
        self.start = start

    def __len__(self) -> int:
        """Returns the number of steps of the epoch from ``start``; it varies by epoch with ``tokens_per_step``."""
        return len(self._all_steps()) - self.start

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's rows in each step of the epoch, from ``start``."""
        for step in self._all_steps()[self.start :]:
            yield self._dealt(step)[self.rank]

    def tokens_per_rank(self) -> Tensor:
        """Returns ``[steps, num_replicas]`` int64: each rank's tokens in each step of the epoch, from ``start``."""
        shares = [self._dealt(step) for step in self._all_steps()[self.start :]]
        tokens = [[sum(self.lengths[row] for row in rows) for rows in ranks] for ranks in shares]
        return torch.tensor(tokens, dtype=torch.int64).view(-1, self.num_replicas)

    def _all_steps(self) -> list[Step]:
        if self._steps is None:
            self._steps = self._planned()
        return self._steps

    def _planned(self) -> list[Step]:
        count = len(self.lengths)
        order: Iterable[int] = range(count)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        budget = self.tokens_per_step or self.rows_per_step or 0
        costs = self.lengths if self.rows_per_step is None else [1] * count
        steps = list(_filled(order, costs, budget, self._fits))
        if not self.drop_last:
            return _with_rows_for_all(steps, self.num_replicas, self._fits)
        is_full = not steps or sum(costs[row] for row in steps[-1]) == budget
        return steps if is_full else steps[:-1]

    def _fits(self, step: Step) -> bool:
        """Returns whether no batch exceeds ``rows_per_rank`` and a share of the tokens; True without such a limit."""
        if self.rows_per_rank is None or self.tokens_per_step is None:
            return True
        share, costs = self.tokens_per_step // self.num_replicas, [self.lengths[row] for row in step]
        if sum(costs) // self.num_replicas + max(costs) < share and len(step) <= self.rows_per_rank:
            return True  # for any rank: a row goes to the rank with the fewest tokens
        return all(
            sum(self.lengths[row] for row in part) <= share and len(part) <= self.rows_per_rank
            for part in self._dealt(step)
        )

    def _dealt(self, step: Step) -> list[list[int]]:
        return _deal(step, self.lengths, self.num_replicas)


# ---- the plan --------------------------------------------------------------------------------------------------


def _filled(
    order: Iterable[int], costs: Sequence[int], budget: int, fits: Callable[[Step], bool]
) -> Iterator[Step]:
    """Yields steps of consecutive rows that cost no more than the budget and fit."""
    step, room = [], budget
    for row in order:
        if costs[row] > room or (step and not fits([*step, row])):
            yield step
            step, room = [], budget
        step.append(row)
        room -= costs[row]
    if step:
        yield step


def _with_rows_for_all(steps: list[Step], ranks: int, fits: Callable[[Step], bool]) -> list[Step]:
    """Returns the rows in steps of at least one row for each rank; only the last given step may have fewer.

    Raises:
        ValueError: all steps together have too few rows.
    """
    *rest, last = steps or [[]]
    ends: list[Step] = []
    while rest and len(last) < ranks:
        rows = rest.pop() + last
        if len(rows) < 2 * ranks and fits(rows):
            last = rows
        else:  # one row for each rank fits
            ends.append(rows[-ranks:])
            last = rows[:-ranks]
    if ends and len(last) < ranks:
        raise ValueError(
            f"TokenBatchSampler: expected a row for each of {ranks} ranks in each step, got {len(last)} rows in "
            f"the first step; use fewer ranks, or drop_last=True"
        )
    return [*rest, *([last] if last else []), *reversed(ends)]


def _deal(step: Step, lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns each rank's rows: longest first, each to the rank with the fewest tokens, then with the fewest rows."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, 0, rank) for rank in range(ranks)]
    for row in sorted(step, key=lambda row: -lengths[row]):
        tokens, rows, rank = heap[0]
        dealt[rank].append(row)
        heapq.heapreplace(heap, (tokens + lengths[row], rows + 1, rank))
    return dealt


# ---- arguments -------------------------------------------------------------------------------------------------


def _as_ints(lengths: Sequence[int] | Tensor) -> list[int]:
    sizes = torch.as_tensor(lengths if len(lengths) else torch.zeros(0, dtype=torch.int64))
    if sizes.dim() != 1 or sizes.dtype == torch.bool or sizes.is_floating_point() or sizes.is_complex():
        raise TypeError(
            f"TokenBatchSampler: expected lengths [rows] as integers, got {sizes.dtype} {tuple(sizes.shape)}; pass "
            f"[len(row) for row in rows]"
        )
    ints = sizes.tolist()
    if min(ints, default=0) < 0:
        raise ValueError(f"TokenBatchSampler: expected lengths of at least 0, got {min(ints)}")
    return ints


def _replicas_and_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns the number of ranks, and the index of this rank."""
    if num_replicas is None and rank is None:
        grouped = dist.is_available() and dist.is_initialized()
        return (dist.get_world_size(), dist.get_rank()) if grouped else (1, 0)
    if num_replicas is None or rank is None:
        raise ValueError(
            f"TokenBatchSampler: expected num_replicas and rank, or neither of them, got num_replicas={num_replicas} "
            f"and rank={rank}"
        )
    if not 0 <= rank < num_replicas:
        raise ValueError(
            f"TokenBatchSampler: expected a rank from 0 to num_replicas - 1, got rank={rank} and "
            f"num_replicas={num_replicas}"
        )
    return num_replicas, rank


def _check_budget(sampler: TokenBatchSampler) -> None:
    """Raises unless one budget is given that each row fits, and there is a row for each rank."""
    tokens, rows, ranks = sampler.tokens_per_step, sampler.rows_per_step, sampler.num_replicas
    count, longest = len(sampler.lengths), max(sampler.lengths, default=0)
    if (tokens is None) == (rows is None):
        raise ValueError(
            f"TokenBatchSampler: expected tokens_per_step or rows_per_step, got tokens_per_step={tokens} and "
            f"rows_per_step={rows}"
        )
    if sampler.rows_per_rank is not None and (tokens is None or sampler.rows_per_rank < 1):
        raise ValueError(
            f"TokenBatchSampler: expected rows_per_rank of at least 1 beside tokens_per_step, got "
            f"{sampler.rows_per_rank} and tokens_per_step={tokens}"
        )
    if tokens is not None and (tokens < 1 or longest > tokens // ranks):
        raise ValueError(
            f"TokenBatchSampler: expected rows of at most {tokens // ranks} tokens, a rank's share of "
            f"tokens_per_step={tokens} on {ranks} ranks, got a row of {longest}. Pass tokens_per_step="
            f"{max(longest, 1) * ranks} or more, or cut the row"
        )
    if rows is not None and rows < ranks:
        raise ValueError(
            f"TokenBatchSampler: expected rows_per_step of at least {ranks}, a row for each rank, got {rows}"
        )
    if 0 < count < ranks and not sampler.drop_last:
        raise ValueError(
            f"TokenBatchSampler: expected at least a row for each of {ranks} ranks, got {count} rows; use fewer ranks, "
            f"or drop_last=True for an epoch without steps"
        )
