"""``torch.cond`` and ``while_loop`` over tensors of declared classes.

PyTorch's implementations of these ops support plain tensors only. The one for fake tensors cannot merge the wrappers
that two branches return, and the derivative replaces wrappers by plain tensors of their size. Each op therefore checks
its operands before it dispatches. If one of them is of a declared class, the ``__torch_dispatch__`` of that class
receives the op, above autograd. It then

- runs the chosen branch, or the loop, as plain Python if nothing is traced;
- under a trace, unwraps the operands, converts the branches to functions over plain tensors, calls the op again on
  these, and wraps the results.

The derivative of ``cond`` is implemented here, as another ``cond`` over wrappers. PyTorch differentiates a loop over
plain tensors, between a differentiable unwrapping and a differentiable wrapping.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import HigherOrderOperator, is_traceable_wrapper_subclass, tree_map
from subclasses._torch_capture import patch_aliasing_checks
from subclasses._torch_tracing import eager_while_loop, is_traced, run_with_interpreter
from subclasses.errors import DispatchError, one_of, way_out
from subclasses.higher_order.branches import example_results
from subclasses.higher_order.cond import call_cond
from subclasses.higher_order.values import with_carriers
from subclasses.higher_order.while_loop import call_while_loop
from subclasses.spec.values import is_declared

Call = Callable[..., Any]


# ---- the callable ----------------------------------------------------------------------------------------------


def higher_order_run(cls: Any, op: HigherOrderOperator) -> Call:
    """Returns the callable that runs a higher-order op on a class."""
    run = _IMPLEMENTATIONS.get(op.name())
    return functools.partial(_raise_unsupported, cls, op) if run is None else functools.partial(run, op)


def _raise_unsupported(cls: Any, op: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
    rule = f"@{cls.__name__}.implements(torch.ops.higher_order.{op.name()})"
    way = way_out(cls, f"pass it the inner tensors, or add a rule with {rule}")
    raise DispatchError(
        f"{cls.__name__} has no rule for the higher-order op {op.name()}", code="no-rule", hint=way
    )


def _run_cond(op: HigherOrderOperator, pred: Any, true_fn: Call, false_fn: Call, operands: Any = ()) -> Any:
    if is_declared(pred):
        raise TypeError(
            f"torch.cond: expected a bool or a plain bool tensor of one element as the predicate, got "
            f"{one_of(type(pred))}. Read an inner tensor, or reduce to a plain tensor"
        )
    if not is_traced(op, (pred, operands)):
        return tree_map(with_carriers, (true_fn if pred else false_fn)(*operands))
    return call_cond(op, pred, (run_with_interpreter(true_fn), run_with_interpreter(false_fn)), operands)


def _run_while_loop(
    op: HigherOrderOperator, cond_fn: Call, body_fn: Call, carried: Any, additional: Any = (), **kwargs: Any
) -> Any:
    if not is_traced(op, (carried, additional)):
        return eager_while_loop(op, cond_fn, body_fn, carried, additional)
    fns = run_with_interpreter(cond_fn), run_with_interpreter(body_fn)
    return call_while_loop(op, fns, carried, additional, **kwargs)


_IMPLEMENTATIONS = {"cond": _run_cond, "while_loop": _run_while_loop}

# Ops that a class may have a rule for.
_RULED = ("flex_attention",)


# ---- dispatching to a class --------------------------------------------------------------------------------


def intercept() -> None:
    """Makes the ops of the table above dispatch to the class of a declared operand first."""
    for name in (*_IMPLEMENTATIONS, *_RULED):
        op = getattr(torch.ops.higher_order, name)
        op.dispatch = _intercept_dispatch(op, op.dispatch)
    patch_aliasing_checks(is_declared, _refuse_handwritten)


def _intercept_dispatch(op: HigherOrderOperator, dispatch: Call) -> Call:
    @functools.wraps(dispatch)
    def dispatch_to_class(key: Any, /, *args: Any, **kwargs: Any) -> Any:
        cls = _declared_class(args)
        if cls is None:
            return _dispatch_plain(op, dispatch, key, args, kwargs)
        return cls.__torch_dispatch__(op, (cls,), args, kwargs)

    return dispatch_to_class


def _dispatch_plain(op: HigherOrderOperator, dispatch: Call, key: Any, args: Any, kwargs: Any) -> Any:
    """Runs PyTorch's own dispatch; names the class of a handwritten operand where PyTorch cannot run the op on it."""
    try:
        return dispatch(key, *args, **kwargs)
    except (AssertionError, NotImplementedError) as error:
        operands = [x for arg in args if isinstance(arg, list | tuple) for x in arg]
        cls = next((type(x) for x in operands if is_traceable_wrapper_subclass(x)), None)
        if cls is None or isinstance(error, DispatchError):
            raise
        raise _handwritten_error(op.name(), cls) from error


def _handwritten_error(name: str, cls: type) -> DispatchError:
    return DispatchError(
        f"{name}: PyTorch cannot run it on {one_of(cls)}, a wrapper class written by hand",
        code="class-not-declared",
        hint=f"declare the class as a TensorSubclass, or pass its inner tensors as operands and make a {cls.__name__} "
        "of the results",
    )


def _refuse_handwritten(t: Any) -> Any:
    """Replaces PyTorch's error for a wrapper that a loop carries or reads."""
    raise _handwritten_error("while_loop", type(t))


def _declared_class(args: Iterable[Any]) -> Any:
    """Returns the first declared class among the operands, or among the example results of a traced branch."""
    for arg in args:
        if isinstance(arg, Tensor | list | tuple):
            values: Iterable[Any] = arg if isinstance(arg, list | tuple) else (arg,)
        else:
            values = example_results(arg)
        for value in values:
            if is_declared(value):
                return type(value)
    return None
