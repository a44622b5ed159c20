"""Layers whose decompositions in PyTorch, which a trace takes, do otherwise than the kernels of eager mode.

Dropout that drops nothing gives a copy there, and its argument in eager mode; recurrent layers drop nothing between
layers in training; multilabel_margin_loss counts the places behind a -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def as_in_eager_mode(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The call of such a layer in a form that does what eager mode does; any other call as it is."""
    if func is F.dropout or func is torch.dropout:
        return (_argument if _drops_nothing(*args, **kwargs) else func), args
    if func is F.multilabel_margin_loss:
        return multilabel_margin_loss, args
    if func not in _RECURRENT:
        return func, args
    if func is torch.lstm:
        args = (_differentiable(args[0]), *args[1:])
    packed, num_layers, dropout, train = isinstance(args[3], list | tuple), *args[-5:-2]
    if packed:
        num_layers, dropout, train = args[-4:-1]
    if kwargs or not (train and dropout and num_layers > 1):
        return func, args
    return (_each_layer_packed if packed else _each_layer), (func, *args)


def _drops_nothing(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    train: bool | None = None,  # the name that the op has for it
) -> bool:
    return p == 0 or (0 < p <= 1 and not (training if train is None else train))


def _argument(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """As torch.nn.functional.multilabel_margin_loss; what stands behind the first -1 of a row is no label."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if input.dim() == 0:
        input, target = input.unsqueeze(0), target.unsqueeze(0)
    is_label = (target == -1).cumsum(-1) == 0
    labels = target.masked_fill(~is_label, 0)
    is_other = input.new_zeros(input.shape).scatter_add(-1, labels, is_label.to(input.dtype)) == 0
    margins = (1 - input.gather(-1, labels).unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)
    counted = is_label.unsqueeze(-1) & is_other.unsqueeze(-2)
    loss = margins.masked_fill(~counted, 0).sum((-2, -1)) / input.shape[-1]
    return loss if reduction == "none" else getattr(loss, reduction)()


def _differentiable(tensor: Tensor) -> Tensor:
    """The tensor as one that requires grad, for PyTorch's decomposition of lstm asks no other argument."""
    needs = torch.is_grad_enabled() and not tensor.requires_grad
    return tensor.detach().requires_grad_() if needs else tensor


def _each_layer(  # noqa: PLR0913 - the op's own arguments
    func: Any,
    x: Tensor,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    def layer(x: Tensor, hidden: Any, params: Any) -> Any:
        return func(x, hidden, params, has_biases, 1, 0.0, train, bidirectional, False)

    x = x.transpose(0, 1) if batch_first else x
    out, *states = _stack(layer, x, hidden, params, num_layers, dropout)
    return (out.transpose(0, 1) if batch_first else out), *states


def _each_layer_packed(  # noqa: PLR0913
    func: Any,
    x: Tensor,
    batch_sizes: Tensor,
    hidden: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Any:
    def layer(x: Tensor, hidden: Any, params: Any) -> Any:
        return func(x, batch_sizes, hidden, params, has_biases, 1, 0.0, train, bidirectional)

    return _stack(layer, x, hidden, params, num_layers, dropout)


def _stack(
    layer: Callable[..., Any], x: Tensor, hidden: Any, params: Any, num_layers: int, dropout: float
) -> Any:
    """Layer after layer, with dropout between them as the eager kernels have it."""
    several = isinstance(hidden, list | tuple)
    states = [state.chunk(num_layers) for state in (hidden if several else (hidden,))]
    width, found = len(params) // num_layers, []
    for n in range(num_layers):
        x = F.dropout(x, dropout) if n else x
        own = [state[n] for state in states]
        x, *new = layer(x, own if several else own[0], params[n * width : (n + 1) * width])
        found.append(new)
    return x, *(torch.cat(parts) for parts in zip(*found, strict=True))
