"""Autograd nodes of what rules for ops make.

PyTorch's formula for an op is about the tensors that values represent. It is the derivative of a use as a whole. What
reads inner tensors of the result asks for another function, from the inner tensors of the operands to those of the
result, which is the rule itself. Both cotangents arrive at one node, so that hooks, ``retain_grad`` and
``torch.autograd.grad`` see all that reaches a value::

    operands <--- PyTorch's formula <---- plain cotangent ------
       ^                                                        |--- node <--- result
        --------- the rule, run again <-- cotangent of its class

The rule runs again in the backward, on open wrappers, and autograd derives that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subclasses._torch import (
    DisableTorchFunctionSubclass,
    any_requires_grad,
    apply_function,
    call_unruled,
    is_below_autograd,
    skip_frames,
)
from subclasses._torch_capture import is_exporting
from subclasses._torch_tracing import keeps_graph, set_version_counters
from subclasses.autograd.construct import (
    Construct,
    Primal,
    Unwrap,
    as_gradient,
    cotangent_like,
    is_differentiable,
    make_leaf,
    unwrap,
)
from subclasses.autograd.history import (
    CALLING,
    History,
    check_unwritten,
    opened,
    replace_tensors,
    rule_parts,
    run_again,
)
from subclasses.autograd.history_errors import (
    check_derivable,
    check_sizes,
    class_gradient_error,
    composite_error,
    fitting,
    refuse_tangents,
    unknown_gradient_error,
    watched_view_error,
)
from subclasses.autograd.incoming_gradients import TAKES_GRADIENTS, check_gradients
from subclasses.autograd.rule_runs import Read, hook_rule
from subclasses.errors import DispatchError
from subclasses.layout import HISTORY, OPEN

Call = Callable[..., Any]


def call_and_settle(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function without a rule, and gives each value that a rule made in it a node of its own."""
    if func in _WATCHING:
        _check_not_read(args[0])
    if func in TAKES_GRADIENTS and not torch.compiler.is_dynamo_compiling():
        args, kwargs = check_gradients(func, args, kwargs)
    if torch.compiler.is_dynamo_compiling():
        return call_unruled(func, types, args, kwargs)  # the ops run, and settle, where its graph is traced
    if is_below_autograd():
        return call_unruled(func, types, args, kwargs)  # a rule, or a dispatch mode that calls the op again
    before = CALLING.made, CALLING.func, CALLING.target
    CALLING.made, CALLING.func = [], func
    CALLING.target = args[0] if func is Tensor.__setitem__ else None
    try:
        out = call_unruled(func, types, args, kwargs)
        inside = CALLING.made
    finally:
        CALLING.made, CALLING.func, CALLING.target = before
    if inside:
        _derive_inside(inside, out)
    if isinstance(out, Tensor):
        return _settled(out) if HISTORY in out.__dict__ else out
    made = args[:1] if func is Tensor.__setitem__ else out
    if not isinstance(made, list | tuple):
        return out
    settled = [_settled(x) if isinstance(x, Tensor) and HISTORY in x.__dict__ else x for x in made]
    is_same = made is not out or all(new is old for new, old in zip(settled, made, strict=True))
    return out if is_same else type(out)(settled)


def _derive_inside(made: list[Tensor], out: Any) -> None:
    """Gives what rules made, and a function of several ops computed on with, the derivatives of the rules.

    Autograd has made a node for each by PyTorch's formula, whose gradients a hook replaces.
    """
    outs = out if isinstance(out, list | tuple) else (out,)
    for t in made:
        history = None if any(t is one for one in outs) else vars(t).pop(HISTORY, None)
        if history is not None and t.grad_fn is not None and not is_exporting():
            hook_rule(t, _Call(history, whole=True))


_WATCHING = frozenset({Tensor.register_hook, Tensor.retain_grad})


def _check_not_read(x: Any) -> None:
    """Raises DispatchError for a hook on a view that a rule made, of which inner tensors were read before."""
    history = x.__dict__.get(HISTORY)
    if isinstance(history, History) and history.is_view and history.parts:
        raise watched_view_error(type(x))


def _settled(x: Any) -> Any:
    """Gives what a rule made its node; returns it, or a plain tensor in place of a plain one."""
    if hasattr(type(x), "__spec__"):
        _settle(x)
        return x
    history = x.__dict__.pop(HISTORY)
    if not any_requires_grad(x) or is_exporting():
        return x
    if x._is_view():  # of the value, which a write to it changes
        hook_rule(x, _Call(history, whole=True))
        return x
    made = _Call(history)
    return apply_function(PlainByRule, _Held(x), made, *made.sources)


class _Held(NamedTuple):
    """A tensor that autograd does not take for an operand."""

    tensor: Any


def _settle(x: Any) -> None:
    """Makes a node for a value from how it was made; a view keeps PyTorch's, which follows writes to its base."""
    history = x.__dict__[HISTORY]
    if history is OPEN or not any_requires_grad(x) or is_exporting():
        return
    with DisableTorchFunctionSubclass():
        base = x._base if x._is_view() else None
    if base is not None:
        _settle_base(base, x)
        return
    if history.is_view:
        return
    if history.parts == {}:
        _add_node(x, _Unknown())  # its history stays, which refuses to read inner tensors
        return
    del x.__dict__[HISTORY]
    _add_node(x, _Call(history) if history.parts is None else Parts(history.parts))


def _settle_base(base: Any, view: Any) -> None:
    """Makes a node for a value that was written to through a view by a rule; PyTorch's formula is behind it."""
    history = base.__dict__.get(HISTORY)
    if isinstance(history, History) and history.made is None and history.parts is not None:
        if history.parts:
            del base.__dict__[HISTORY]
        _add_node(base, Parts(history.parts) if history.parts else _Unknown())
        # PyTorch made the view's node when it was written to, of the base's node then, and makes one for each version.
        with DisableTorchFunctionSubclass():
            for version in (view._version + 1, view._version):
                set_version_counters((view,), (version,))
                view.grad_fn  # noqa: B018 - the access makes it


def _add_node(x: Any, made: Any) -> None:
    with DisableTorchFunctionSubclass():
        version = x._version
        apply_function(MadeByRule, x, made, *made.sources)
        set_version_counters((x,), (version,))


class MadeByRule(torch.autograd.Function):
    """The node of a value: it takes the place of that of PyTorch's formula, which is behind it."""

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(ctx: Any, x: Any, made: Any, *sources: Tensor) -> Any:
        """Returns the value itself; its grad_fn is this node from now on."""
        ctx.made, ctx.cls, ctx.count = made, type(x), len(sources)
        # PyTorch's formula would compute with the plain cotangent and values, which represent no plain tensors.
        ctx.replaces_formula = replaces = isinstance(made, Parts) and made.replaces_formula
        is_wrapped = replaces or not ctx.cls._traits.is_representation
        is_known = ctx.cls._traits.pulls_back and not isinstance(made, _Unknown)
        ctx.primal = Primal(x) if is_wrapped and is_known else None
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns the cotangent for PyTorch's formula, or one for each source by the rule."""
        (cotangent,) = cotangents
        cotangent = as_gradient(ctx.cls, cotangent)
        if ctx.primal is not None and cotangent is not None and not isinstance(cotangent, ctx.cls):
            cotangent = ctx.primal.wrap_cotangent(cotangent)
        if not isinstance(cotangent, ctx.cls) and not ctx.replaces_formula:
            return cotangent, None, *(None for _ in range(ctx.count))
        return None, None, *_pulled_back(ctx, cotangent)


class PlainByRule(torch.autograd.Function):
    """The node of a plain tensor that a rule made of values which represent no plain tensors."""

    jvp = staticmethod(refuse_tangents)

    @staticmethod
    def forward(ctx: Any, x: _Held, made: _Call, *sources: Tensor) -> Tensor:
        """Returns a tensor over the same memory, without the node of PyTorch's formula."""
        ctx.made, ctx.count = made, len(sources)
        ctx.set_materialize_grads(False)
        return x.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Returns a cotangent for each source by the rule.

        Raises:
            DispatchError: the cotangent is one of a class, since a mapped op has the tensor as its plain operand.
        """
        if cotangents[0] is None:
            return None, None, *(None for _ in range(ctx.count))
        if hasattr(kind := type(cotangents[0]), "__spec__"):
            raise class_gradient_error(kind, "the gradient of a plain tensor", "a rule made of a value")
        return None, None, *_pulled_back(ctx, cotangents[0])


def _pulled_back(ctx: Any, cotangent: Any) -> list[Any]:
    made = ctx.made
    if made is None:
        raise RuntimeError(
            "the backward of what a rule made ran a second time; specify retain_graph=True the first time"
        )
    cotangents = made.pull_back(cotangent)
    if not keeps_graph():
        ctx.made = None
    return cotangents


class _Unknown:
    """A value that a rule wrote to in a way whose derivative by inner tensors is not known."""

    sources = ()

    def pull_back(self, cotangent: Any) -> list[Any]:
        raise unknown_gradient_error(type(cotangent))


class Parts:
    """A value whose inner tensors are known as differentiable functions, as after an op that writes.

    Attributes:
        replaces_formula: whether a plain cotangent goes to them too, and not to PyTorch's formula.
    """

    replaces_formula = False

    def __init__(self, parts: dict[str, Any]) -> None:
        self.names = [n for n, t in parts.items() if t is not None and t.requires_grad]
        self.sources = [parts[n] for n in self.names]

    def pull_back(self, cotangent: Any) -> list[Any]:
        """Returns the cotangents of the sources."""
        sizes = [t.shape for t in self.sources]
        return fitting(type(cotangent), self.names, unwrap(cotangent, tuple(self.names)), sizes)


class _Call:
    """A value by the call that made it.

    Attributes:
        history: the call.
        sources: what gets cotangents: operands that require grad, and of a view that a rule made its inner tensors.
        inners: for each such view its inner tensors, as differentiable functions.
        error: why they are not known.
    """

    def __init__(self, history: History, *, whole: bool = False) -> None:
        self.history, self.error = history, None
        self.inners: dict[int, tuple[Any, ...]] = {}
        self.operands: list[Any] = []
        self.sources: list[Tensor] = []
        for t in history.operands:
            if not any_requires_grad(t) or any(t is o for o in self.operands):
                continue
            self.operands.append(t)
            made_by = t.__dict__.get(HISTORY)
            if isinstance(made_by, History) and not whole:
                self.sources += self._read(t, made_by)
            else:
                self.sources.append(t)

    def _read(self, t: Any, made_by: History) -> list[Tensor]:
        if not hasattr(type(t), "__spec__"):
            self.error = composite_error()
            return [t]
        try:
            found = self.inners[id(t)] = made_by.read(t, type(t).__spec__.attributes)
        except DispatchError as error:
            self.error = error  # a use as a whole does not need them
            return []
        return [i for i in found if i is not None and i.requires_grad]

    def pull_back(self, cotangent: Any) -> list[Any]:
        """Returns the cotangents of the sources.

        Raises:
            DispatchError: an operand was written to since, or the rule has no derivative.
        """
        if self.error is not None:
            raise self.error
        history = self.history
        cls = next(type(t)._value_cls for t in (cotangent, *history.operands) if hasattr(type(t), "__spec__"))
        run, args, kwargs, number = history.made  # type: ignore[misc]
        check_unwritten(history, cls)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(cotangent.device.type, enabled=False):
            inners = [self._leaves(t, create_graph) for t in self.operands]
            values = {
                id(t): opened(t, i) if hasattr(type(t), "__spec__") else i[0]
                for t, i in zip(self.operands, inners, strict=True)
            }
            found = run_again(cls, run, replace_tensors(args, values), replace_tensors(kwargs, values))
            outputs, given = _roots(cls, found if number is None else found[number], cotangent)
            check_sizes(cls, outputs, given)
            leaves = [t for i in inners for t in i if t is not None and t.requires_grad]
            grads = iter(
                torch.autograd.grad(outputs, leaves, given, allow_unused=True, create_graph=create_graph)
            )
        found = []
        for t, i in zip(self.operands, inners, strict=True):
            given = [next(grads) if leaf is not None and leaf.requires_grad else None for leaf in i]
            found += self._cotangents(t, given)
        return found

    def _leaves(self, t: Any, create_graph: bool) -> Sequence[Any]:
        """Returns what to derive by: the inner tensors of an operand, or itself."""
        if id(t) in self.inners:
            held = self.inners[id(t)]
        elif not hasattr(type(t), "__spec__"):
            held = (t,)
        else:
            names = type(t).__spec__.attributes
            held = unwrap(t, names) if create_graph else [t.__dict__[n] for n in names]
        return [make_leaf(i, create_graph) if is_differentiable(i) else i for i in held]  # type: ignore[arg-type]

    def _cotangents(self, t: Any, given: list[Any]) -> list[Any]:
        if id(t) in self.inners:
            return [
                g for g, i in zip(given, self.inners[id(t)], strict=True) if i is not None and i.requires_grad
            ]
        if not hasattr(type(t), "__spec__"):
            return given
        return [None if all(g is None for g in given) else cotangent_like(t, given)]


def _roots(cls: Any, found: Any, cotangent: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns what to derive, of what a rule returned for open wrappers, and the cotangents of that."""
    if not hasattr(type(cotangent), "__spec__"):
        check_derivable(cls, found)
        return [found], [cotangent]
    parts = rule_parts(found, cls)
    wanted = tuple([n for n, t in parts.items() if t is not None and t.requires_grad])
    return [parts[n] for n in wanted], unwrap(cotangent, wanted)


# The engine calls these, also where a compiled function calls `backward()` between two graphs: Dynamo would take each
# for a frame of the user's.
for _function in (Construct, Unwrap, Read, MadeByRule, PlainByRule):
    skip_frames(_function.backward)
