"""``RowWiseAdagrad``: Adagrad with one accumulator for each row of a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses.keyed.sharded.table_shard import TableShard


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number of state for each row of a table, instead of one for each of its entries.

    For a gradient ``g [D]`` of a row: ``sum += mean(g * g)``, ``row -= lr * g / (sqrt(sum) + eps)``. Rows without a
    gradient do not change. The optimizer accepts dense and sparse gradients, of tables ``[V, D]`` and of `TableShard`.
    The state of a shard is a shard, which `torch.distributed.checkpoint` loads on another number of ranks.

    Args:
        params: parameters of two dimensions, or groups of them.
        lr: the learning rate.
        eps: is added to the root of the sum.
        initial_accumulator_value: the sum of each row at first.

    Raises:
        ValueError: an option is negative, or a parameter is not a table ``[V, D]``.
    """

    def __init__(
        self, params: Any, lr: float = 1e-2, *, eps: float = 1e-10, initial_accumulator_value: float = 0.0
    ) -> None:
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in options.items():
            if value < 0:
                raise ValueError(f"RowWiseAdagrad.{name}: expected a number from 0, got {value}")
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of tables, and makes their state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for table in group["params"]:
            if table.dim() != 2:
                raise ValueError(
                    f"RowWiseAdagrad: expected tables [V, D], got a parameter of size {tuple(table.shape)}"
                )
            rows = _rows_here(table)
            sums = rows.new_full(rows.shape[:1], group["initial_accumulator_value"])
            self.state[table]["sum"] = table.like(sums) if isinstance(table, TableShard) else sums

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Updates each table that has a gradient; returns the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    parts = (_rows_here(t) for t in (table, table.grad, self.state[table]["sum"]))
                    _update(*parts, lr=group["lr"], eps=group["eps"])
        return loss


def _rows_here(t: Tensor) -> Tensor:
    return t.rows_here() if isinstance(t, TableShard) else t.detach()


def _update(table: Tensor, grad: Tensor, sums: Tensor, *, lr: Any, eps: float) -> None:
    """Updates a table and its sums in place."""
    if not grad.is_sparse:
        sums.add_(grad.square().mean(1))
        table.sub_(lr * grad / (sums.sqrt() + eps).unsqueeze(1))
        return
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values()
    sums.index_add_(0, rows, values.square().mean(1))
    scale = sums.index_select(0, rows).sqrt() + eps
    table.index_add_(0, rows, -lr * values / scale.unsqueeze(1))
