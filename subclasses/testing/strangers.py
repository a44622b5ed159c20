"""The promise about a class that nobody knows, in one call with a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subclasses._torch import disabled_torch_function_impl, make_wrapper_subclass
from subclasses.testing.cases import like
from subclasses.testing.promise import Attempt, Broken, promise, refusal
from subclasses.testing.subject import Subject


class Stranger(Tensor):
    """A subclass that nobody knows; it notes which classes a call that reaches it has."""

    asked: list[tuple[type, ...]]

    @staticmethod
    def __new__(cls, like: Tensor) -> Any:
        """A stranger with the outside of another tensor."""
        x = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        x.asked = []
        x.inside = torch.ones(like.shape, dtype=like.dtype, device=like.device)
        return x

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return "Stranger()"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inners: Any, context: Any, size: Any, stride: Any) -> Any:
        return Stranger(inners["inside"])

    __torch_function__ = disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, Stranger):
                x.asked.append(tuple(types))
        return torch.zeros(())


@promise(
    "in __torch_dispatch__, `return NotImplemented` if types holds a class that you do not know: not every "
    "tensor that is not of your class is a plain one"
)
def strangers(s: Subject) -> None:
    """A call with an unknown subclass is left to that subclass, or refused."""
    ops: list[Any] = [torch.hypot, torch.fmax, torch.logaddexp]
    for op in ops:
        x = s.make()
        for flip in (False, True):
            stranger = Stranger(like(x))
            args = (stranger, x) if flip else (x, stranger)
            with Attempt() as attempt, torch.no_grad():
                op(*args)
            asked = any(s.cls in types for types in stranger.asked)
            if attempt.error is None and not asked:
                raise Broken(
                    f"torch.{op.__name__} on a {s.name} and an unknown subclass gave a result, and the unknown "
                    f"subclass was {'never asked' if not stranger.asked else 'asked about its part alone'}"
                )
            if attempt.error is not None and refusal(attempt.error) is None:
                raise attempt.error
