"""Programs that `torch.compile(..., backend="desugar").aot_compile(...)` saves and loads.

PyTorch writes the guards and the code of the frame, and the backend's result serializes itself. A saved program holds
the files that the store keeps for a program, and its whole description. Loading generates the wrapper
again from these. The file is a pickle, like PyTorch's own files: load only files that you trust.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NoReturn

from desugar import _torch as private
from desugar.backends.choose import choose_backend
from desugar.backward.recompute import CapturedFunction
from desugar.errors import DesugarError
from desugar.flatten.fakes import Fakes
from desugar.pipeline import wrap_program
from desugar.program import Program
from desugar.store.pickling import CannotStore, known_values
from desugar.store.programs import PackedPlace


class SavedProgram:
    """A program that can be written to a file; calling it runs the program.

    Attributes:
        program: The program.
        content: Its pickle.
    """

    def __init__(self, program: Program, content: bytes) -> None:
        self.program, self.content = program, content

    def __call__(self, *args: Any) -> Any:
        """Runs the program on the arguments of Dynamo's graph."""
        return self.program.run(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedProgram) -> bytes:
        """Returns the pickle; PyTorch calls this method to save the program."""
        return fn.content

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavedProgram:
        """Loads a program from its pickle, in any process that can import the classes of its arguments and results."""
        content = pickle.loads(data)
        fakes, place = _fakes_of(content["symbols"]), PackedPlace(content["program"])
        backend = choose_backend("inductor", content["mode"], content["options"])
        compiled = place.unpack(fakes)
        refuse = CapturedFunction(_refuse, _refuse)
        return cls(wrap_program(compiled, refuse, fakes, backend, _refuse, place), data)


def save_program(
    program: Program, place: PackedPlace, mode: str | None, options: Mapping[str, Any]
) -> SavedProgram:
    """Returns a program that PyTorch can write to a file.

    Raises:
        DesugarError: The program holds a value that another process could not load.
    """
    if program.variants is not None:
        arriving = (True,) * len(program.variants.traced.tangents)
        program.variants.table[arriving]  # compiles the backward, which the file holds, too
    try:
        if place.problem is not None:
            raise place.problem
        content = {
            "program": place.files,
            "symbols": place.symbols,
            "mode": mode,
            "options": dict(options),
        }
        data = pickle.dumps(content)
    except (CannotStore, pickle.PicklingError, TypeError, AttributeError) as error:
        raise DesugarError(
            f"this program cannot be saved: {error}",
            instead="pass what it holds as an argument, and define its classes in a module",
        ) from error
    private.SerializableCallable.register(SavedProgram)
    return SavedProgram(program, data)


# ---------------------------------------------------------------------------------------------- its arguments


def _fakes_of(symbols: Mapping[Any, tuple[Any, Any]]) -> Fakes:
    fakes = Fakes()
    for symbol, (value, known_range) in symbols.items():
        known_values(fakes.env)[symbol] = value
        if known_range is not None:
            fakes.env.var_to_range[symbol] = known_range
    return fakes


def _refuse(*args: Any) -> NoReturn:
    raise DesugarError(
        "a saved program was called in a way that needs its function again: arguments that share memory with one "
        "that it writes to, gradients of another type than its results, or second derivatives",
        instead="compile the function in this process for such calls",
    )
