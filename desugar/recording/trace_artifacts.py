"""Shows compilations in PyTorch's own tools: `TORCH_TRACE`, which `tlparse` displays, and the logger.

With `TORCH_TRACE` set, each compilation writes its layouts, graphs, wrapper text, stages and reason as artifacts
under Dynamo's compile id. The logger `desugar` logs each compilation and its reason at `INFO`, and the texts of the
artifacts at `DEBUG`. `TORCH_LOGS="desugar"` and `TORCH_LOGS="+desugar"` set these levels.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

from desugar import _torch as torch_private
from desugar.ir.values import describe
from desugar.recording.listeners import Recording, publish_recording
from desugar.recording.user_names import function_name

log = logging.getLogger("desugar")


@contextlib.contextmanager
def record_compilation(made: Recording) -> Iterator[None]:
    """Records the compilation inside the context for listeners, `TORCH_TRACE` and the logger."""
    # torch always installs its handler; the handler has a folder only if TORCH_TRACE names one.
    is_traced = any(getattr(handler, "root_dir", None) for handler in torch_private.trace_log.handlers)
    with publish_recording(made, also=emit if is_traced or log.isEnabledFor(logging.DEBUG) else None):
        yield


def emit(made: Recording) -> None:
    """Writes the texts of a compilation to `TORCH_TRACE` and to the logger."""
    function = function_name(made.fn, made.graph)
    for name, text in collect_texts(made).items():
        kind = "json" if name in ("stages", "reason") else "string"
        torch_private.trace_structured(
            "artifact",
            metadata_fn=lambda name=name, kind=kind: {"name": f"desugar_{name}", "encoding": kind},
            payload_fn=lambda text=text: text,
        )
        log.debug("%s: %s\n%s", function, name.replace("_", " "), text)


def collect_texts(made: Recording) -> dict[str, str]:
    """Returns the text of each artifact, by name."""
    function = function_name(made.fn, made.graph)
    reason = {"function": function, "reason": made.failed or made.reason, "seconds": made.seconds}
    if made.error is not None:
        reason["error"] = f"{type(made.error).__name__}: {made.error}"
    texts = {"reason": json.dumps(reason), "stages": json.dumps(dict(made.stages))}
    program = made.program
    if program is None:
        return texts
    layouts = ["inputs", *(describe(value, "  ") for value in program.inputs)]
    layouts += ["results", *(describe(value, "  ") for value in program.outputs)]
    texts["layouts"] = "\n".join(layouts)
    texts["forward_graph"] = program.forward.print_readable(print_output=False)
    if program.backward is not None:
        texts["backward_graph"] = program.backward.print_readable(print_output=False)
    return texts | {"wrapper": program.source}
