"""The commands `python -m desugar package ...`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from desugar.errors import PackageError, SignatureError
from desugar.ir.values import Constant, Plain, Wrapper, dynamic_names, inner_names, is_wrapper
from desugar.packages.load import Package, load
from desugar.packages.manifest.records import Leaf
from desugar.packages.manifest.structure import arrange, names_of
from desugar.packages.show import show as describe
from subclasses.handwritten import unflatten
from subclasses.layout import field_name

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Looks into packages of desugar.save, and calls them."
)

File = Annotated[Path, typer.Argument(metavar="FILE.pt2", help="A package.")]


@app.command()
def show(file: File) -> None:
    """Prints signatures, layouts, sizes, weights and the digest; runs nothing of the file."""
    try:
        typer.echo(describe(str(file)))
    except (FileNotFoundError, PackageError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def call(
    file: File,
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="INPUTS.safetensors",
            help="The tensors by argument (x, x.values, pair[0]); ints in the file's metadata, by the same names.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the result's tensors to a file.")
    ] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", metavar="MODULE:CLASS", help="A class of the package.")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="The digest that the package has to have.")] = None,
    native: Annotated[bool, typer.Option(help="Run the machine code of the file.")] = True,
) -> None:
    """Runs a package on tensors of a file, without gradients, and prints or writes what it returns."""
    try:
        package = load(file, classes=map(_find_class, classes or ()), sha256=sha256, native=native)
        args, kwargs = _arguments(package, *_read(inputs))
        with torch.no_grad():
            result = package(*args, **kwargs)
    except (FileNotFoundError, PackageError, SignatureError) as error:
        raise typer.BadParameter(str(error)) from error
    tensors = dict(_tensors_in(result, "result"))
    if out is not None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out)
        typer.echo(f"wrote {out}", err=True)
    else:
        for name, tensor in tensors.items():
            typer.echo(f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}\n{tensor}")


def _find_class(name: str) -> type:
    module, _, cls = name.partition(":")
    try:
        named_class = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(
            f"expected MODULE:CLASS that can be imported, got {name!r}: {error}"
        ) from error
    return named_class  # type: ignore[no-any-return]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise typer.BadParameter(f"{path} cannot be read as safetensors: {error}") from error


# ------------------------------------------------------------------------------------------------ arguments


def _arguments(package: Package, tensors: dict[str, Tensor], numbers: dict[str, str]) -> Any:
    """Returns the arguments of a call, for the first program whose tensor names match the file's."""
    missing = []
    for program in package.programs:
        names = names_of(program.arguments)
        pairs = list(zip(program.leaves, names, strict=True))
        wanted = {name for leaf, where in pairs for name in _names_of(leaf, where)}
        if wanted == set(tensors):
            leaves = [_leaf(leaf, where, tensors, numbers) for leaf, where in pairs]
            bound = arrange(package.__signature__, program.arguments, leaves)
            return bound.args, bound.kwargs
        missing.append(", ".join(sorted(wanted)))
    raise typer.BadParameter(f"expected the tensors {' or '.join(missing)}, got {', '.join(sorted(tensors))}")


def _names_of(leaf: Leaf, name: str) -> Iterator[str]:
    if isinstance(leaf, Wrapper):
        for attribute, part in leaf.inner:
            yield from _names_of(part, f"{name}.{field_name(attribute)}")  # type: ignore[arg-type]
    elif isinstance(leaf, Plain):
        yield name


def _leaf(leaf: Any, name: str, tensors: dict[str, Tensor], numbers: dict[str, str]) -> Any:
    match leaf:
        case Wrapper():
            inner = {
                attribute: _leaf(part, f"{name}.{field_name(attribute)}", tensors, numbers)
                for attribute, part in leaf.inner
            }
            for field, _ in leaf.dynamics:
                inner[f"_{field}_carrier"] = torch.empty((_number(f"{name}.{field}", numbers), 0))
            return unflatten(leaf.cls, inner, leaf.context, (), None)
        case Plain():
            return tensors[name]
        case Constant(_, int()):
            return _number(name, numbers)
        case Constant(value):
            return value
    raise typer.BadParameter(f"{name} is an argument that a file cannot hold")


def _number(name: str, numbers: dict[str, str]) -> int:
    text = numbers.get(name, "")
    if not text.lstrip("-").isdecimal():
        raise typer.BadParameter(f"expected the int {name} in the metadata of the inputs, got {text!r}")
    return int(text)


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and is_wrapper(value):
        for attribute in (*inner_names(value), *dynamic_names(type(value))):
            yield from _tensors_in(getattr(value, attribute), f"{name}.{field_name(attribute)}")
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _tensors_in(part, f"{name}[{number}]")
    elif isinstance(value, int):
        yield name, torch.tensor(value)
