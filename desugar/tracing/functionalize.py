"""What a trace gets wrong, refused where it is met: writes that functionalization carries back wrongly, seeds.

It adds up what several elements of an expanded tensor did to the one that they stand for, and gives zeros to what
lies between the windows of `unfold`.
"""

from __future__ import annotations

import functools
import secrets
import threading
from typing import Any

import optree
import torch
from torch import Tensor

from desugar import _torch as private
from desugar.errors import DesugarError, user_line
from desugar.ir.values import inner_names, is_wrapper


def check_target(name: str, target: Tensor) -> None:
    """Raises for a tensor that stands for one element several times, if an op is about to write to it."""
    extents = zip(target.size(), target.stride(), strict=True)
    repeats = any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in extents)
    if repeats or any(_is_unfolded(part) for part in plain_parts(target)):
        how = "expanded" if repeats else "unfolded"
        raise DesugarError(
            f"{name} writes to an {how} tensor of size {tuple(target.shape)}",
            where=user_line(),
            instead="write to the tensor that it is a view of, or to a clone()",
            stock_is_wrong=True,
        )


def _is_unfolded(tensor: Any) -> bool:
    if not isinstance(tensor, private.FunctionalTensor):
        return False
    return any("unfold" in type(view).__name__ for view in private.get_view_meta_sequence(tensor.elem))


def plain_parts(tensor: Any) -> list[Any]:
    """The plain tensors inside a tensor."""
    if not is_wrapper(tensor):
        return [tensor]
    return [part for name in inner_names(tensor)[0] for part in plain_parts(getattr(tensor, name))]


def functional_mode() -> Any:
    """PyTorch's functionalization, which looks at what a class's own `__torch_dispatch__` writes to as well."""
    return _watching_class()()


@functools.cache
def _watching_class() -> type:
    class Watching(private.FunctionalTensorMode):
        supports_higher_order_operators = True

        def __enter__(self) -> Any:
            # Dynamo has called the function on fakes before, so the seed that it sets may be in force: not a fresh one.
            torch.default_generator.manual_seed(secrets.randbits(63))
            self.rng = _rng_state()
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            schema = getattr(func, "_schema", None)
            if schema is None:  # a higher-order op has functions for modes by their very type
                return func.python_key_table[private.FunctionalTensorMode](self, *args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded in func.tags:
                check_rng(self.rng)
            if not schema.is_mutable or torch.Tag.inplace_view in func.tags:
                return super().__torch_dispatch__(func, types, args, kwargs)
            targets = _written(func, args, kwargs or {})
            for target in targets:
                check_target(str(func), target)
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not _counts_versions(func):
                torch.autograd.graph.increment_version(targets)
            return result

    return Watching


def _rng_state() -> tuple[int, Tensor]:
    with private.disable_current_modes(), private.DisableTorchFunction():
        return torch.default_generator.initial_seed(), torch.default_generator.get_state()


def _just_seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def check_rng(before: tuple[int, Tensor]) -> None:
    """Raises when the function has seeded the generator: ops on fakes draw no numbers, so it stands where it did.

    Another thread may draw numbers meanwhile, which leaves the seed as it was, and the state not as just seeded.
    """
    seed, state = _rng_state()
    with private.disable_current_modes(), private.DisableTorchFunction():
        if seed == before[0] and torch.equal(state, before[1]):
            return
        if seed == before[0] and threading.active_count() > 1 and not torch.equal(state, _just_seeded(seed)):
            return
    raise DesugarError(
        "the function sets the state of the random number generator (torch.manual_seed, set_rng_state)",
        where=user_line(),
        instead="seed outside the compiled function, or pass a torch.Generator",
        stock_is_wrong=True,
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    targets = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written: Any = args[number] if number < len(args) else kwargs.get(argument.name)
            leaves = optree.tree_leaves(written, none_is_leaf=True)
            targets += [target for target in leaves if isinstance(target, private.FunctionalTensor)]
    return targets


@functools.cache
def _counts_versions(func: Any) -> bool:
    """Whether autograd raises the version counters of what an op writes; else its own kernel does, in eager mode.

    So it is with `torch._foreach_mul_` and most custom ops; nobody counts what `batch_norm` writes to its buffers.
    """
    is_own = func.namespace == "aten" and not func.__name__.startswith(("_foreach_", "_fused_", "_amp_"))
    return is_own or private.has_kernel(func.name(), "ADInplaceOrView")
