"""What PyTorch's own tools get to see of a compilation: `TORCH_TRACE`, which `tlparse` shows, and the logger.

With `TORCH_TRACE` set, each compilation leaves its layouts, graphs, wrapper text, stages and reason as artifacts
under a compile id of its own, with the stack of the call (behind Dynamo, under Dynamo's). The logger `desugar` says
at `INFO` what is compiled and why, and at `DEBUG` shows the same texts: `TORCH_LOGS="desugar"` and
`TORCH_LOGS="+desugar"` set these levels.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import traceback
from collections.abc import Iterator
from typing import Any

from desugar import _torch as private, listening
from desugar.errors import is_library_file
from desugar.faults import code_of
from desugar.listening import Recording
from desugar.values import describe

log = logging.getLogger("desugar")

_ids = itertools.count(10_000)  # frames that Dynamo counts begin at 0


@contextlib.contextmanager
def recorded(
    fn: Any, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Recording | None]:
    """A compilation that listeners, `TORCH_TRACE` and the logger hear of."""
    # torch's own handler is there from the start, and knows a folder only if TORCH_TRACE names one.
    is_traced = any(getattr(handler, "root_dir", None) for handler in private.trace_log.handlers)
    also = emit if is_traced or log.isEnabledFor(logging.DEBUG) else None
    with (
        _compile_id(fn) if is_traced else contextlib.nullcontext(),
        listening.recording(fn, reason, args, kwargs, also=also) as recording,
    ):
        yield recording


@contextlib.contextmanager
def _compile_id(fn: Any) -> Iterator[None]:
    """An id for what is traced, where there is none, and where the call stands in the user's code."""
    if private.CompileContext.try_get() is not None:
        yield
        return
    number = private.CompileId(frame_id=next(_ids), frame_compile_id=0)
    with private.compile_context(private.CompileContext(number)):
        private.trace_structured("dynamo_start", lambda: {"stack": private.from_traceback(_stack(fn))})
        yield


def _stack(fn: Any) -> list[traceback.FrameSummary]:
    """The user's lines that lead to a call, and the function that is called: `tlparse` draws its tree of these."""
    frames = [frame for frame in traceback.extract_stack() if not is_library_file(frame.filename)]
    code = code_of(fn)
    return frames if code is None else [*frames, traceback.FrameSummary(*code)]


def emit(recording: Recording) -> None:
    """Hands a compilation's texts on."""
    for name, text in collect_texts(recording).items():
        kind = "json" if name in ("stages", "reason") else "string"
        private.trace_structured(
            "artifact",
            metadata_fn=lambda name=name, kind=kind: {"name": f"desugar_{name}", "encoding": kind},
            payload_fn=lambda text=text: text,
        )
        log.debug("%s: %s\n%s", _name(recording.fn), name.replace("_", " "), text)


def collect_texts(recording: Recording) -> dict[str, str]:
    """Name of an artifact -> its text."""
    reason = {"function": _name(recording.fn), "reason": recording.reason, "seconds": recording.seconds}
    if recording.error is not None:
        reason["error"] = f"{type(recording.error).__name__}: {recording.error}"
    texts = {"reason": json.dumps(reason), "stages": json.dumps(dict(recording.stages))}
    program = recording.program
    if program is None:
        return texts
    layouts = ["inputs", *(describe(value, "  ") for value in program.inputs)]
    layouts += ["results", *(describe(value, "  ") for value in program.outputs)]
    texts["layouts"] = "\n".join(layouts)
    texts["forward_graph"] = program.forward.print_readable(print_output=False)
    if program.backward is not None:
        texts["backward_graph"] = program.backward.print_readable(print_output=False)
    return texts | {"wrapper": program.source}


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)
