"""View and in-place semantics, derived from an op's schema.

Below autograd an op on a wrapper returns a new wrapper. If the schema declares a result to be a view, the result shares
the storage of its argument. AOTAutograd and version counters then detect the alias. If the schema declares that an
argument is written and returned, that argument itself is returned. Other ops have no overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from subclasses._torch import (
    VIEWS_KEY,
    DisableTorchFunctionSubclass,
    FunctionalTensor,
    OpOverload,
    is_excluded,
    return_and_correct_aliasing,
    set_excluded,
    set_storage_of,
    storage_key,
)
from subclasses.errors import DispatchError, one_of, way_out
from subclasses.layout import describe_metadata, field_name
from subclasses.op_schemas.schema import OpFacts, op_facts
from subclasses.spec.values import (
    PLAIN,
    differ,
    dynamic_ints,
    innermost,
    is_differentiable,
    known_to_differ,
    lies_within,
    with_inners,
)


def with_aliasing(op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``run`` so that its results follow the view and in-place semantics of the schema of ``op``."""
    facts = op_facts(op)
    if facts.functional:
        return run
    if facts.changes_metadata:
        return lambda *args, **kwargs: _change_metadata(op, run, args, kwargs)
    if facts.written:
        return lambda *args, **kwargs: return_written(facts, args, kwargs, run(*args, **kwargs))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if out is NotImplemented:
            return out
        outs = out if len(facts.returns) > 1 else (out,)
        for i, j in facts.viewed:
            base = args[i] if i < len(args) else argument(facts, args, kwargs, i)
            for view in outs[j] if isinstance(outs[j], list | tuple) else (outs[j],):
                # A result of another class is a copy.
                if view.__class__ is base.__class__ and view is not base:
                    set_storage_of(view, base)
        return out

    return wrapped


def _change_metadata(op: OpOverload, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs an op that changes sizes or strides in place.

    Raises:
        DispatchError: autograd records, and the value is a view.
    """
    x = args[0]
    with DisableTorchFunctionSubclass():
        is_view = x.requires_grad and x._is_view()
    if is_view:
        raise DispatchError(
            f"{op} on {one_of(type(x))} that is a view and requires grad: PyTorch takes the view again, without this "
            "change, for the gradient of a later write",
            code="view-derivative",
            hint="use the op that returns a view, such as x.mT",
        )
    return return_and_correct_aliasing(op, args, kwargs, run(*args, **kwargs))


def holds_plain(x: Any) -> bool:
    """Whether the innermost tensors of a value are plain, or a trace's tensors that count their versions."""
    while (layout := x.__dict__.get("_layout")) is not None:
        if not layout.present:
            return False
        x = x.__dict__[layout.present[0]]
    return x.__class__ in PLAIN or x.__class__ is FunctionalTensor


def return_written(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Returns the written arguments themselves for the results that the schema ties to them."""
    if out is NotImplemented or not facts.returns:
        return out
    outs = out if len(facts.returns) > 1 else (out,)
    back = [
        o if i is None else argument(facts, args, kwargs, i)
        for i, o in zip(facts.returned, outs, strict=True)
    ]
    return back[0] if len(back) == 1 else tuple(back)


def with_checked_writes(cls: Any, op: OpOverload, words: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the rule of an op that writes: a result with memory of its own is an error, since it would be lost.

    Raises:
        DispatchError: the rule, which ``words`` describe, returned a new value in place of its target.
    """
    facts = op_facts(op)
    if not any(i is not None for i in facts.returned):
        return run

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if out is NotImplemented:
            return out
        for i, one in zip(facts.returned, out if len(facts.returned) > 1 else (out,), strict=True):
            if i is not None:
                target = argument(facts, args, kwargs, i)
                check_writes_target(cls, op, words, target, one)
                if facts.changes_metadata:
                    _check_changed(cls, op, words, target, one)
                if isinstance(target, cls):  # below autograd, no version shows writes to inner tensors
                    inners = list(innermost(target))
                    bump_versions([t for t in inners if is_differentiable(t)] or inners)
        return out

    return wrapped


def check_writes_target(cls: Any, op: Any, words: str, target: Any, result: Any) -> None:
    """Raises DispatchError if an op that writes to ``target`` returned a tensor with other memory than ``target``."""
    if result is target or not isinstance(target, cls) or not isinstance(result, Tensor):
        return
    if not lies_within(result, target):
        field = cls.__spec__.inners[0].name
        raise DispatchError(
            f"{op} on {one_of(cls)}: {words} returned a value with memory of its own, in place of the {cls.__name__} "
            "to write to",
            code="rule-write",
            hint=f"write to its inner tensors, as x.{field}.copy_(...) does, and return x. Or register a rule for the "
            "functional form of the op, from which this form follows",
        )


def _check_changed(cls: Any, op: OpOverload, words: str, target: Any, result: Any) -> None:
    """Raises DispatchError if a rule for an op that changes sizes in place returned a value of another size instead."""
    if result is target or not (isinstance(target, cls) and isinstance(result, cls)):
        return
    if [t.shape for t in innermost(target)] != [t.shape for t in innermost(result)]:
        field, method = cls.__spec__.inners[0].name, op.overloadpacket.__name__
        raise DispatchError(
            f"{op} on {one_of(cls)}: {words} returned a new value, in place of the {cls.__name__} that is to have its "
            "sizes",
            code="rule-write",
            hint=f"change the sizes of its inner tensors, as x.{field}.{method}(...) does, and return x",
        )


def argument(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], index: int) -> Any:
    """Returns the argument at an index of the schema, passed by position or by keyword."""
    return args[index] if index < len(args) else kwargs.get(facts.arguments[index].name)


def with_versions_of_base(
    op: OpOverload, run: Callable[..., Any], *, is_copy: bool, by_rule: bool
) -> Callable[..., Any]:
    """Wraps ``run``: a view shares the version counter of its base, and each inner tensor its base's counter.

    After a write to the base, autograd then detects that saved inner tensors of the view are stale. In inference mode,
    a view of a normal tensor is normal.

    Args:
        op: the op.
        run: its callable.
        is_copy: whether the callable returns no views of inner tensors.
        by_rule: whether the callable is a rule of the author, which may have called another op on the value.
    """
    facts = op_facts(op)
    index, is_inference_mode = facts.viewed[0][0], torch.is_inference_mode_enabled

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        base = args[index] if index < len(args) else argument(facts, args, kwargs, index)
        if is_inference_mode() and not base.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                return run(*args, **kwargs)
        if is_copy or not (is_excluded(VIEWS_KEY) and holds_plain(base)):
            return run(*args, **kwargs)
        set_excluded(VIEWS_KEY, False)
        try:
            out = run(*args, **kwargs)
        except RuntimeError as error:
            if _STRIDES not in str(error):
                raise
            raise _strides_error(op, base) from error
        finally:
            set_excluded(VIEWS_KEY, True)
        if out.__class__ is base.__class__ and not by_rule:
            return out
        return [_untracked(one, base) for one in out] if isinstance(out, list) else _untracked(out, base)

    return wrapped


_STRIDES = "view size is not compatible with input tensor's size and stride"


def _strides_error(op: OpOverload, base: Any) -> RuntimeError:
    """Returns the error for a view, such as a call by `reshape`, that the strides of an inner tensor do not allow."""
    return RuntimeError(
        f"{op} on {one_of(type(base))}: {_STRIDES}, of one of its inner tensors. A reshape goes by the strides that "
        f"the value shows; call it on x.clone(memory_format=torch.contiguous_format)"
    )


def _untracked(out: Any, base: Any) -> Any:
    """Returns a result, or an alias of it if it is tracked as a view already: PyTorch then tracks the result itself."""
    if not isinstance(out, Tensor):
        return out
    if out.__class__ is not base.__class__:
        return torch.ops.aten.alias.default(out)
    with DisableTorchFunctionSubclass():
        if not out._is_view():
            return out
    new = with_inners(out, [out.__dict__[n] for n in base.__spec__.attributes])
    set_storage_of(new, base)
    new.__dict__.update(out.__dict__)
    return new


def may_overlap(t: Tensor) -> bool:
    """Whether elements of a plain tensor share memory, as in an expanded tensor; few ops write to such a tensor."""
    return t.__class__ in PLAIN and t.layout is torch.strided and 0 in t.stride() and t.numel() > 0


# ---- writing -----------------------------------------------------------------------------------------------

State = tuple[int, list[tuple[str, Tensor, int]]]


def raw_state(x: Any) -> State | None:
    """Returns the version of a declared value, and its inner tensors with their versions; None for other arguments."""
    if not hasattr(type(x), "__spec__") or x.is_inference():
        return None
    inners = [(n, t) for n in type(x).__spec__.attributes if is_differentiable(t := x.__dict__[n])]
    with DisableTorchFunctionSubclass():
        return x._version, [(n, t, 0 if t.is_inference() else t._version) for n, t in inners]


def is_written_unseen(before: State, x: Any) -> bool:
    """Whether inner tensors were assigned since, or written to without a new version of the value.

    An assigned inner tensor is detached.
    """
    version, inners = before
    _, now = raw_state(x) or before
    with DisableTorchFunctionSubclass():
        seen = x._version != version
    pairs = list(zip(inners, now, strict=False))
    return any(t is not u for (_, t, _), (_, u, _) in pairs) or (
        not seen and any(v != w for (_, _, v), (_, _, w) in pairs)
    )


def bump_versions(tensors: Sequence[Tensor | None]) -> None:
    """Bumps the version counters of inner tensors, as eager mode does for the tensor that an op writes to.

    Below autograd nothing else bumps them, and autograd would not detect that a tensor saved by :meth:`unwrap` changed.
    """
    if not is_excluded(VIEWS_KEY):
        return  # ops on inner tensors count
    for t in tensors:
        if t is not None and not t.is_inference():
            torch.autograd.graph.increment_version(t)


def with_counted_writes(cls: Any, op: OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an op that writes to the elements of lists, whose versions autograd leaves to the kernel."""
    facts = op_facts(op)
    lists = [i for i in facts.written if facts.arguments[i].role == "tensors"]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        if out is not NotImplemented:
            for i in lists:
                bump_versions([t for t in argument(facts, args, kwargs, i) if isinstance(t, cls)])
        return out

    return wrapped if lists else run


def resize_outer(written: Any, cls: Any) -> None:
    """Updates the outer size of a wrapper after an ``out=`` op resized its inner tensors."""
    if isinstance(written, cls):
        spec = cls.__spec__
        values = [written.__dict__[n] for n in (*spec.attributes, *(f.name for f in spec.dynamics))]
        new = cls._wrap(written._layout, *values)
        if new.shape != written.shape:
            # torch's setter, which sets the size and stride and leaves the inner tensors.
            object.__setattr__(written, "data", new)


def for_optimizers(cls: Any) -> str:
    """Returns a hint for an optimizer that writes to a value of a class."""
    if cls._traits.trainable:
        return "; an optimizer, which writes so, is given torch.nn.Parameter(x), and not x"
    advice = (
        "an optimizer, which writes so, updates each inner tensor of a class declared with trainable=True"
    )
    return f"; {way_out(cls, advice)}"


def write_into(op: OpOverload, target: Any, value: Any) -> None:
    """Copies a result into a wrapper, one inner tensor at a time.

    Raises:
        DispatchError: the result has another class, other metadata, or inner tensors of other sizes. Also if the op
            is not a copy, and inner tensors have dtypes that in-place ops do not cast.
    """
    cls = type(target)
    if type(value) is not cls or value._layout is not target._layout:
        raise DispatchError(
            f"{op}: cannot write {_describe(value)} into {_describe(target) if type(value) is cls else one_of(cls)}",
            code="write-misfit",
            hint="use the functional "
            f"op{for_optimizers(cls) if op is torch.ops.aten.add_.Tensor and not cls._traits.trainable else ''}",
        )
    spec = cls.__spec__
    named = [(n, target.__dict__[n], value.__dict__[n]) for n in spec.attributes]
    pairs = [(a, b) for _, a, b in named if a is not None and a is not b]
    if (
        known_to_differ(target.shape, value.shape)
        or any(map(differ, dynamic_ints(target), dynamic_ints(value)))
        or any(a.shape != b.shape for a, b in pairs)
    ):
        raise _sizes_error(op, target, value)
    if op is not torch.ops.aten.copy_.default:
        for name, a, b in named:
            if a is not None and not torch.can_cast(b.dtype, a.dtype):
                raise DispatchError(
                    f"{op}: result type {b.dtype} of {field_name(name)!r} can't be cast to the {a.dtype} of "
                    f"{one_of(cls)}",
                    code="write-misfit",
                    hint="use the functional op",
                )
    for a, _ in pairs[1:]:  # the first one raises before it is written to
        if may_overlap(a) and a.numel() > 1:
            a.new_zeros(1).expand(2).copy_(a.new_zeros(2))  # raises the error of a write to it
    pairs = [(a, b) for a, b in pairs if not holds_already(a, b)]
    for a, b in pairs:
        a.copy_(b)
    bump_versions([a for a, _ in pairs])


def holds_already(a: Tensor, b: Tensor) -> bool:
    """Whether writing one tensor to another of its size changes nothing.

    They are the same elements of the same memory, if a rule returned its operand's tensor, or equal integers. A write
    to integers would be an error in a backward that saved them, as an index for example.
    """
    if a.device.type == "cpu" and not is_differentiable(a) and PLAIN.issuperset((a.__class__, b.__class__)):
        return a.dtype is b.dtype and torch.equal(a, b)
    return is_same_memory(a, b)


def is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one size are the same elements of the same memory."""
    return (
        storage_key(a) == storage_key(b)
        and (a.dtype, a.stride(), a.storage_offset()) == (b.dtype, b.stride(), b.storage_offset())
        and not (a.is_conj() or b.is_conj() or a.is_neg() or b.is_neg())
    )


def write_plain(op: OpOverload, target: Tensor, value: Tensor, *, is_out: bool) -> None:
    """Copies a plain result into a plain tensor, which keeps its own dtype, as in torch.

    A tensor that is passed as ``out=`` is resized to the result; an operand that is written to must have its size.

    Args:
        op: the op that writes.
        target: the tensor that it writes to.
        value: the result.
        is_out: whether ``target`` is passed as ``out=``.

    Raises:
        RuntimeError: the dtype of the result is not cast to the dtype of the target, or the operand has another size.
    """
    of = "out=" if is_out else "the operand that it writes to"
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"{op}: result type {value.dtype} can't be cast to the {target.dtype} of {of}")
    if target.shape != value.shape:
        if not is_out:
            raise RuntimeError(
                f"{op}: the result has the shape {_show(value.shape)}, and {of} has {_show(target.shape)}"
            )
        target.resize_(value.shape)
    target.copy_(value)


def _sizes_error(op: OpOverload, target: Any, value: Any) -> DispatchError:
    """Returns the error for a value whose outer size, dynamic ints or inner tensors' sizes differ; names the first."""
    spec = type(target).__spec__
    sizes = [("size", target.shape, value.shape)]
    sizes += [(f.name, (target.__dict__[f.name],), (value.__dict__[f.name],)) for f in spec.dynamics]
    pairs = [(f.name, target.__dict__[f.attribute], value.__dict__[f.attribute]) for f in spec.inners]
    sizes += [(f"size of {name}", a.shape, b.shape) for name, a, b in pairs if a is not None]
    what, wanted, got = next(entry for entry in sizes if entry[1] != entry[2])
    hint = "a functional op, such as x + y for x += y, makes a new value"
    if op is torch.ops.aten.copy_.default:
        hint = "use the other value itself, as load_state_dict(state, assign=True) does"
    return DispatchError(
        f"{op}: cannot write {one_of(type(value))} into one of another {what}: expected {_show(wanted)}, got "
        f"{_show(got)}",
        code="write-misfit",
        hint=hint,
    )


def _show(sizes: Any) -> str:
    return str(tuple(sizes)) if len(sizes) != 1 else str(sizes[0])


def _describe(x: Any) -> str:
    layout = x.__dict__.get("_layout") if isinstance(x, Tensor) else None
    if layout is not None:
        return describe_metadata(layout)
    return f"a plain tensor of size {tuple(x.shape)}" if type(x) is Tensor else one_of(type(x))
