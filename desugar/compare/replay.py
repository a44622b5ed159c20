"""Repeats a script's compiled calls after its end: in eager mode, with stock `torch.compile` and with this library.

While the script runs, :class:`ScriptCalls` copies the arguments of each call that compiles, before the call can write
to them. The script itself runs unchanged. After its end, each call is repeated with new copies, in all ways and in
turns. Parameters, buffers and gradients are restored afterwards. A call that cannot be repeated is left out, with the
reason. Calls with graph breaks are left out, too, since lines between their graphs may write to files. They are
repeated if every graph break of the script is at a branch or a read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from desugar import _torch as torch_private
from desugar._torch import compiled_call
from desugar.api import call_of, with_own_code
from desugar.compare.import_names import Call
from desugar.compare.judge import judge
from desugar.compare.meters import shuffled_rounds, time_turn
from desugar.compare.outcome import Outcome, copy_parts, leaves_of, parts_of, shared_memory
from desugar.compare.processes import WayFailed, describe_error
from desugar.compare.records import Verdict, Way, with_times
from desugar.compare.subject import SEED, Subject, look, make_step, observe_calls, seed
from desugar.compare.ways import BACKEND, DIRECT, EAGER, STOCK, TUNED, compile_way, watch_programs
from desugar.compare.worth import sum_up
from desugar.dynamo.entry import CompiledCallable
from desugar.explain.records import Report, Worth
from desugar.ir.values import is_wrapper
from desugar.recording.frames import BRANCH, READ, count_compilations
from desugar.recording.listeners import Recording, compilation_owner
from desugar.user_code import is_library_file

_CALLS = 2  # compared calls
_KEPT = 2**30  # the most bytes of all copied arguments
_BUDGET, _MOST = 2.0, 50  # seconds and rounds of the turns of one call
_TURN, _REPEATS, _COPIED = 2e-3, 20, 2**26  # seconds, calls, and bytes of arguments of one turn

Tell = Callable[[str], None]


# ----------------------------------------------------------------------------------------- compiled functions


@dataclass
class Owner:
    """A function or module that a script compiled by `desugar.compile` or `torch.compile(backend="desugar")`.

    Calls in other ways keep the script's order, so that the same sizes become symbolic.

    Attributes:
        what: The function or module.
        ways: The ways in which its calls are repeated; the script's own way comes last.
        given: The backend that Dynamo received, with the options.
        code: The code of the frame that runs the function; the user's frames that it calls run between its graphs.
    """

    what: Any
    ways: tuple[str, ...]
    given: Any
    code: types.CodeType

    def backend(self) -> Any:
        """Returns the compiler of its graphs: a name, or a function of the script's."""
        return self.given.kwargs.get("options", {}).get("backend", "inductor")

    def options(self) -> dict[str, Any]:
        """Returns the script's options that `torch.compile` and `desugar.compile` share."""
        options = self.given.kwargs.get("options", {})
        options = {name: value for name, value in options.items() if name not in ("backend", "strict")}
        more = {"dynamic": self.given.dynamic, "mode": self.given.kwargs.get("mode"), "options": options}
        return {name: value for name, value in more.items() if value not in (None, {})}

    @cached_property
    def compiled(self) -> dict[str, Any]:
        """The function compiled anew in all ways, with the script's options."""
        return {
            way: compile_way(way, self._with_own_code(way), self.backend(), **self.options())
            for way in self.ways
        }

    @cached_property
    def compiled_to_draw(self) -> dict[str, Any]:
        """The function compiled again in all ways, to draw random numbers as eager mode does."""
        return replace(self).compiled

    def _with_own_code(self, way: str) -> Any:
        """Returns the function with a copy of its code, since Dynamo would reuse its compilations of the same code."""
        fn = self.what
        if way == EAGER:
            return fn
        if isinstance(fn, nn.Module):
            return with_own_code(call_of(fn))
        if isinstance(fn, types.MethodType) and isinstance(fn.__func__, types.FunctionType):
            return types.MethodType(with_own_code(fn.__func__), fn.__self__)
        return with_own_code(fn) if isinstance(fn, types.FunctionType) else fn


def _owner_in_progress(known: dict[Any, tuple[Owner, Any]]) -> tuple[Owner | None, Call]:
    """Returns the compiled function that this thread calls, and its arguments; None if there is none.

    Args:
        known: The functions so far, one owner for each, with the object that must stay alive to keep its id.
    """
    calls = compilation_owner()
    call = calls.arguments_in_progress() if isinstance(calls, CompiledCallable) else None
    if isinstance(calls, CompiledCallable) and call is not None:
        ways = (EAGER, STOCK, TUNED, DIRECT)
        made = Owner(calls.what, ways, calls.backend, CompiledCallable._call_compiled.__code__)
        return known.setdefault(id(calls), (made, calls))[0], call
    in_progress = compiled_call()
    if in_progress is None or getattr(in_progress.backend, "compiler_name", None) != "desugar":
        return None, ((), {})
    made = Owner(in_progress.what, (EAGER, STOCK, TUNED, BACKEND), in_progress.backend, in_progress.code)
    key = id(in_progress.context), id(in_progress.what)
    return known.setdefault(key, (made, in_progress.context))[0], (in_progress.args, in_progress.kwargs)


# ----------------------------------------------------------------------------------------------------- copies


class NoCopy(ValueError):
    """The arguments of a call cannot be copied; the message has the reason."""


def copy_call(call: Call) -> Call:
    """Copies the arguments of a call; modules among them are state, and are not copied.

    Raises:
        NoCopy: Arguments share memory, or one cannot be copied.
    """
    leaves = {id(leaf): leaf for _, leaf in leaves_of(call, "")}
    tensors = {str(number): leaf for number, leaf in leaves.items() if isinstance(leaf, Tensor)}
    if any(True for _ in shared_memory(tensors)):
        raise NoCopy("its arguments share memory, and copies of them would not")
    memo = {number: leaf for number, leaf in leaves.items() if isinstance(leaf, nn.Module)}
    try:
        memo |= {id(tensor): _copy_tensor(tensor) for tensor in tensors.values()}
        return copy.deepcopy(call, memo)
    except Exception as error:  # a class of the user's may raise anything
        raise NoCopy(
            f"its arguments cannot be copied: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def _copy_tensor(tensor: Tensor) -> Tensor:
    """Copies a tensor with its strides; the copy of a non-leaf tensor is not an autograd leaf, either."""
    with torch.no_grad():
        copied = _copy_values(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    if type(tensor) is Tensor:
        vars(copied).update(vars(tensor))  # marks of sizes that become symbolic
    if not tensor.requires_grad:
        return copied
    copied.requires_grad_()
    with torch.enable_grad():
        return copied if tensor.is_leaf else copied.clone()


def _copy_values(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    if is_wrapper(tensor) or tensor.layout is not torch.strided or copied.stride() == tensor.stride():
        return copied
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size
    )
    flat = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def bytes_of(call: Call) -> int:
    """Returns the bytes of the tensors in the arguments of a call."""
    tensors = {id(leaf): leaf for _, leaf in leaves_of(call, "") if isinstance(leaf, Tensor)}
    plain_tensors = [part for tensor in tensors.values() for _, part in parts_of(tensor)]
    return sum(part.numel() * part.element_size() for part in plain_tensors)


# ------------------------------------------------------------------------------------------------------ state


@contextlib.contextmanager
def restored(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Sets the gradients of tensors to None inside the context; restores their values and gradients afterwards."""
    before = copy_parts(state)
    gradients = {name: tensor.grad for name, tensor in state.items() if tensor.is_leaf}
    try:
        for name in gradients:  # a backward accumulates into an existing gradient
            state[name].grad = None
        yield
    finally:
        for name, tensor in state.items():
            _restore(tensor, before[name])
            if name in gradients:
                tensor.grad = gradients[name]


def _restore(tensor: Tensor, before: list[Tensor]) -> None:
    with torch.no_grad():
        for (_, part), value in zip(parts_of(tensor), before, strict=True):
            if part.shape == value.shape and not torch.equal(part.detach(), value):
                part.detach().copy_(value)


# ---------------------------------------------------------------------------------------- calls of the script


def _modes_now() -> list[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Returns functions that make contexts with PyTorch's current modes."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(partial(torch.autocast, device, torch.get_autocast_dtype(device)) for device in devices),
    ]


@dataclass(slots=True)
class _RecordedCall:
    """A call that compiled programs.

    Attributes:
        owner: The compiled function; None if unknown.
        numbers: Its programs, by their numbers in the report.
        call: Copies of its arguments, from before it ran.
        modes: Functions that make contexts with the modes of the call.
        is_broken: Whether it runs more than one graph.
        why_not: Why it cannot be repeated; empty if it can.
    """

    owner: Owner | None
    numbers: list[int]
    call: Call = ((), {})
    modes: list[Callable[[], contextlib.AbstractContextManager[Any]]] = field(default_factory=_modes_now)
    is_broken: bool = False
    why_not: str = ""


class ScriptCalls:
    """The calls that compile while a script runs: `keep` is called with each compilation, `compare` at the end."""

    def __init__(self) -> None:
        self._recorded_calls: list[_RecordedCall] = []
        self._owners: dict[Any, tuple[Owner, Any]] = {}
        self._last = threading.local()
        self._number, self._bytes = 0, 0

    def keep(self, recording: Recording) -> None:
        """Keeps the call in progress. Compilations come in the order of the programs of the report."""
        number, self._number = self._number, self._number + 1
        if recording.program is None:
            return
        owner, call = _owner_in_progress(self._owners)
        if owner is None:
            self._recorded_calls.append(_RecordedCall(None, [number], why_not=_NO_OWNER))
            return
        args, recorded_call = getattr(self._last, "call", (None, None))
        if args is not call[0] or recorded_call is None:
            recorded_call = self._take(owner, call)
            self._last.call = call[0], recorded_call
        recorded_call.numbers.append(number)
        recorded_call.is_broken |= not recording.program.is_whole or _is_inside_a_broken_call(owner.code)

    def _take(self, owner: Owner, call: Call) -> _RecordedCall:
        recorded_call = _RecordedCall(owner, [])
        self._recorded_calls.append(recorded_call)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            recorded_call.why_not = "the script runs on several processes, which would wait for each other"
        elif not isinstance(owner.backend(), str):
            recorded_call.why_not = "its backend is a function of the script's"
        elif (nbytes := bytes_of(call)) + self._bytes > _KEPT:
            recorded_call.why_not = "the arguments of all compiled calls together take more than 1 GiB"
        else:
            try:
                recorded_call.call = copy_call(call)
                self._bytes += nbytes
            except NoCopy as error:
                recorded_call.why_not = str(error)
        return recorded_call

    def compare(self, report: Report, tell: Tell = lambda text: None) -> Report:
        """Repeats the calls; returns the report with the times, or the reasons why there are none."""
        programs = list(report.programs)
        broken = (*report.breaks, *report.not_compiled)
        unsafe = next((text for text in broken if not text.endswith((BRANCH, READ))), "")
        for number, recorded_call in enumerate(self._recorded_calls, 1):
            first = recorded_call.numbers[0]
            tell(f"{programs[first].title}, call {number} of {len(self._recorded_calls)}, in other ways")
            if not recorded_call.why_not and recorded_call.is_broken and unsafe:
                recorded_call.why_not = (
                    f"lines between its graphs may change files and the like, as here: {unsafe}"
                )
            if recorded_call.owner is not None and not recorded_call.why_not:
                train = any(len(programs[n].graphs) > 1 for n in recorded_call.numbers)
                try:
                    programs[first] = replace(
                        programs[first], worth=_compare(recorded_call.owner, recorded_call, train=train)
                    )
                except KeyboardInterrupt:
                    recorded_call.why_not = "interrupted"
                except WayFailed as error:
                    recorded_call.why_not = str(error)
            reason = (
                recorded_call.why_not
                or f"it belongs to the call of program {first + 1}, which is timed as a whole"
            )
            for n in recorded_call.numbers if recorded_call.why_not else recorded_call.numbers[1:]:
                programs[n] = replace(programs[n], no_worth=reason)
        return replace(report, programs=tuple(programs))


_NO_OWNER = (
    'it was compiled outside of a call of a function from desugar.compile or torch.compile(backend="desugar"); '
    "`desugar compare` times any function"
)


def _is_inside_a_broken_call(code: types.CodeType) -> bool:
    """Returns whether a frame of the user's code lies between the frame that runs the function and this compilation."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        if not is_library_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


# ---------------------------------------------------------------------------------------------------- the ways


def _compare(owner: Owner, recorded_call: _RecordedCall, *, train: bool) -> Worth:
    """Makes one call in all ways: compares its outcomes, then times and profiles it.

    Raises:
        WayFailed: Eager mode raised, so there is nothing to compare with.
    """
    modules = {
        path: leaf for path, leaf in leaves_of(recorded_call.call, "arguments") if isinstance(leaf, nn.Module)
    }
    subject = Subject(owner.what, lambda: [copy_call(recorded_call.call)], train, modules=modules)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), contextlib.ExitStack() as stack:
        for make in recorded_call.modes:
            stack.enter_context(make())
        with (
            restored(subject.state()),
            contextlib.redirect_stdout(io.StringIO()),
            # The script may have compiled the same lines so often already that the limit is reached.
            torch_private.dynamo_config.patch(recompile_limit=256, accumulated_recompile_limit=1024),
        ):
            results = _judge(subject, owner)
            recompiled = _measure(subject, owner.compiled, results, bytes_of(recorded_call.call))
    more = ["each a step of a training: the call, the sum of its results, the backward"] if train else []
    more += [f"{len(recorded_call.numbers)} programs together"] if len(recorded_call.numbers) > 1 else []
    more += ["times include compiling: equal calls were compiled again and again"] if recompiled else []
    worth = sum_up(
        _CALLS,
        [results[way] for way in owner.ways],
        *more,
        train=train,
        backend=owner.backend(),
        options=owner.options(),
    )
    return replace(worth, answer=_EACH_COMPILES, losses=()) if recompiled else worth


_EACH_COMPILES = "unknown, equal calls were compiled again and again"


def _judge(subject: Subject, owner: Owner) -> dict[str, Way]:
    """Compares two calls of each way with eager mode; a way that raised has the verdict "error"."""
    try:
        want, again = _observe(subject, owner.what), _observe(subject, owner.what)
    except Exception as error:
        raise WayFailed(
            "user", f"made again after the script's end, it raised {describe_error(error)}"
        ) from error
    results = {EAGER: Way(EAGER, Verdict("judge"))}
    if not judge(list(zip(want, again, strict=True))).agrees:
        unknown = Verdict("unknown", "eager mode does not do the same twice")
        return results | {way: Way(way, unknown) for way in owner.ways[1:]}
    after = _random_states()
    seed(SEED + _CALLS)  # as before the last call
    draws = not all(map(torch.equal, after, _random_states()))
    compiled = owner.compiled_to_draw if draws else owner.compiled
    for way in owner.ways[1:]:
        with (
            _noting_errors(results, way),
            watch_programs(subject.fn) as programs,
            torch_private.inductor_config.patch(fallback_random=draws),
        ):
            verdict = judge(list(zip(want, _observe(subject, compiled[way]), strict=True)))
            results[way] = Way(way, verdict, programs())
    return results


@contextlib.contextmanager
def _noting_errors(results: dict[str, Way], way: str) -> Iterator[None]:
    """Turns an error of a way inside the context into its verdict."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is a result of the comparison
        results[way] = Way(way, Verdict("error", describe_error(error)))


def _observe(subject: Subject, compiled: Any) -> list[Outcome]:
    with restored(subject.state()):
        return observe_calls(subject, compiled, _CALLS)


def _random_states() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


# -------------------------------------------------------------------------------------------------- measuring


def _measure(subject: Subject, compiled: dict[str, Any], results: dict[str, Way], nbytes: int) -> bool:
    """Times warm calls in turns, with copies of the arguments that are made before each turn; then profiles one call.

    Adds the figures of the ways that did not fail to `results`. Returns whether equal calls were compiled again.
    """
    repeats: dict[str, int] = {}
    for way, fn in compiled.items():
        if results[way].verdict.state != "error":
            with _noting_errors(results, way):
                _turn(subject, fn, 1)
                repeats[way] = _repeats(_turn(subject, fn, 1), nbytes)
    samples: dict[str, list[float]] = {way: [] for way in repeats}
    count = count_compilations()
    for order in shuffled_rounds(repeats, _MOST, _BUDGET):
        for way in order:
            samples[way].append(_turn(subject, compiled[way], repeats[way]))
    recompiled = count_compilations() != count
    for way, times in samples.items():
        memory, graph = look(subject, compiled[way], subject.make_calls()[0])
        results[way] = replace(with_times(results[way], times, samples[EAGER]), memory=memory, graph=graph)
    return recompiled


def _repeats(seconds: float, nbytes: int) -> int:
    """Returns the number of calls in a turn, whose arguments are in memory at the same time."""
    return max(1, min(round(_TURN / max(seconds, 1e-9)), _REPEATS, _COPIED // max(nbytes, 1)))


def _turn(subject: Subject, fn: Any, repeats: int) -> float:
    steps = iter([make_step(subject, fn, subject.make_calls()[0]) for _ in range(repeats + 1)])
    return time_turn(lambda: next(steps)(), repeats)
