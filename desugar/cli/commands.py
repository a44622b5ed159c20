"""The commands of `python -m desugar`."""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import subclasses
from desugar import _torch as torch_private
from desugar.api import calls_of, compile as desugar_compile
from desugar.cli import comparing, packages
from desugar.cli.checks import check_backend, check_outputs
from desugar.cli.doctor import examine
from desugar.cli.progress import progress
from desugar.cli.script import run_script
from desugar.compare.import_names import TargetError, find_calls, find_factory, find_target, inputs_beside
from desugar.compare.processes import format_error
from desugar.compare.records import Request
from desugar.compare.subject import make_module
from desugar.errors import DesugarError
from desugar.explain.api import Explanation, explain as explain_function
from desugar.explain.render import render_page
from desugar.explain.text import duration, render_report_text
from desugar.ir.values import is_wrapper
from desugar.user_code import is_library_file
from subclasses.errors import one_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Shows how desugaring changed your code, and whether it works here.",
)

Target = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="A dotted module or a file, and a name in it.")
]
Inputs = Annotated[
    str | None,
    typer.Option(
        metavar="[MODULE:]FACTORY",
        help="A function that makes the arguments: a tuple, or a dict by name. Default: FUNCTION_inputs.",
    ),
]
BackendName = Annotated[
    str, typer.Option(help='"eager" runs the plain graphs as they are; "inductor" compiles them.')
]
ManyInputs = Annotated[
    str | None,
    typer.Option(
        metavar="[MODULE:]FACTORY",
        help="A function that makes the arguments: a tuple, a dict by name, or for several calls a list of "
        "tuples. Default: NAME_inputs.",
    ),
]
Train = Annotated[
    bool, typer.Option("--train", help="A call is a training step: forward, sum of float results, backward.")
]
Rounds = Annotated[int, typer.Option(min=2, help="In each, every way takes a turn.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one step of a way.")]

# Folders of the libraries whose frames lie between the shell and the user's own code.
_COMMAND_LINE = tuple(str(Path(inspect.getfile(cls)).parent) for cls in (typer.Typer, typer.BadParameter))


@contextlib.contextmanager
def users_errors() -> Iterator[None]:
    """Exits with code 2 for a wrong target on the command line, and with code 1 for an error of the user's code."""
    try:
        yield
    except TargetError as error:
        raise typer.BadParameter(str(error)) from error
    except DesugarError as error:
        typer.echo(f"cannot be desugared: {error}", err=True)
        raise typer.Exit(1) from error
    except torch_private.TorchDynamoException as error:  # its text has the position in the user's code
        text = str(error).partition("\n\nSet TORCHDYNAMO_VERBOSE")[0]
        typer.echo(f"Dynamo cannot capture it as one graph: {text}", err=True)
        raise typer.Exit(1) from error
    except SystemExit as end:  # it would end the command without output
        typer.echo(f"the code that was to be looked at called sys.exit({end.code!r})", err=True)
        raise typer.Exit(1) from end
    except Exception as error:
        typer.echo(format_error(error, _is_users), err=True, nl=False)
        raise typer.Exit(1) from error


def _is_users(file: str) -> bool:
    return not is_library_file(file) and not file.startswith(_COMMAND_LINE)


# ------------------------------------------------------------------------------------------------ commands


@app.command()
def explain(  # noqa: PLR0913 - one parameter for each option
    target: Target,
    inputs: Inputs = None,
    backend: BackendName = "eager",
    html: Annotated[Path | None, typer.Option(help="Write a page instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Print each repeated layer.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the call in eager mode and under torch.compile, too.")
    ] = False,
) -> None:
    """Tells what becomes of one call: its lines, ops, graphs and cost."""
    check_outputs(("--html", html, ".html"))
    check_backend(backend)
    with users_errors():
        module, target_object = find_target(target)
        name = target.rpartition(":")[2].rpartition(".")[2]
        fn = make_module(target_object, has_inputs=bool(inputs or inputs_beside(module, name)))
        args, kwargs = find_calls(module, fn, inputs, name)[0]
        compiled = fn if calls_of(fn) is not None else desugar_compile(fn, backend=backend)
        explanation = explain_function(compiled, *args, **kwargs)
    if compare:
        worth = comparing.worth_of(Request(target, inputs, backend, calls=3), rounds=20)
        explanation = Explanation(replace(explanation.program, worth=worth))
    if as_json:
        typer.echo(explanation.to_json())
    elif html is not None:
        typer.echo(f"wrote {explanation.to_html(html)}", err=True)
    else:
        typer.echo(explanation.text(folded=False) if whole else str(explanation))


# Arguments after SCRIPT.py belong to the script, as in `python SCRIPT.py`, options and `--` included.
@app.command(context_settings={"allow_interspersed_args": False})
def report(
    script: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, metavar="SCRIPT.py", help="Options come before it."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments and options.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--report", help="The page to write.")] = Path("report.html"),
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the data, too.")] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Afterwards, time compiled calls in eager mode and torch.compile, too."
        ),
    ] = False,
) -> None:
    """Runs a script, and writes a page about its programs."""
    check_outputs(("--report", out, ".html"), ("--json", json_out, ".json"))
    page, data = out.resolve(), None if json_out is None else json_out.resolve()  # a script may call chdir
    script_report, code = run_script(script, arguments or [], compare=compare)
    page.write_text(render_page(script_report), encoding="utf-8")
    if data is not None:
        data.write_text(json.dumps(script_report.to_dict()), encoding="utf-8")
    typer.echo(render_report_text(script_report), err=True, nl=False)
    typer.echo(f"wrote {out}", err=True)
    if code:
        typer.echo(f"{script.name} ended with exit code {code}", err=True)
        raise typer.Exit(code)


@app.command()
def coverage(
    target: Annotated[str, typer.Argument(metavar="MODULE:CLASS")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every op as JSON.")] = False,
) -> None:
    """Tells, op by op, how a class runs it.

    By a rule, by its structure, by decomposition, or not at all.
    """
    with users_errors():
        cls = find_target(target)[1]
        try:
            class_coverage = subclasses.coverage(cls)
        except subclasses.SpecError as error:
            raise TargetError(str(error)) from error
    typer.echo(json.dumps(class_coverage.steps, indent=1) if as_json else str(class_coverage))


@app.command()
def check(  # noqa: PLR0913 - one parameter for each option
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:FACTORY", help="Makes a value; or a class, with --factory."),
    ],
    factory: Annotated[
        str | None,
        typer.Option(metavar="[MODULE:]FUNCTION", help="Makes a value, where the target is a class."),
    ] = None,
    level: Annotated[
        str, typer.Option(help='"smoke": eager mode; "gradients"; "full": Inductor, too.')
    ] = "gradients",
    only: Annotated[
        list[str] | None, typer.Option(metavar="PROMISE", help="Try it; may be repeated.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="PROMISE", help="Leave it out; may be repeated.")
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(metavar="[MODULE:]FACTORY", help="Makes a value of another size; at least two."),
    ] = None,
    variants: Annotated[
        list[str] | None, typer.Option(metavar="[MODULE:]FACTORY", help="Makes a value with other metadata.")
    ] = None,
    wrap: Annotated[
        str | None, typer.Option(metavar="[MODULE:]FUNCTION", help="A plain tensor to a value.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="[MODULE:]FUNCTION", help="A value to its plain tensor."),
    ] = None,
    construct: Annotated[
        str | None, typer.Option(metavar="[MODULE:]FUNCTION", help="Inner tensors to a value.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the outcomes, too.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a test suite in JUnit's XML, too.")] = None,
) -> None:
    """Puts a class to the conformance kit's test.

    FACTORY takes nothing and gives a value of the class. The options have the names of arguments of
    subclasses.testing.check.
    """
    from subclasses import testing

    check_outputs(("--json", json_out, ".json"), ("--junit", junit, ".xml"))
    start = time.perf_counter()
    with users_errors(), progress() as tell:
        module, target_object = find_target(target)
        make = find_factory(factory or target, module)
        check_makes_subclass(factory or target, made := make())
        if factory is not None and type(made) is not target_object:
            raise TargetError(f"expected {factory} to make a value of {target}, got {one_of(type(made))}")
        many = {"sizes": sizes, "variants": variants}
        one = {"wrap": wrap, "reference": reference, "construct": construct}
        options: dict[str, Any] = {"level": level, "only": only, "skip": skip}
        options |= {
            name: [find_factory(text, module) for text in texts] for name, texts in many.items() if texts
        }
        options |= {name: find_target(text, module)[1] for name, text in one.items() if text}
        try:
            report = testing.examine(
                make, tell=tell, **{name: value for name, value in options.items() if value}
            )
        except TypeError as error:
            raise TargetError(str(error)) from error
    for path, text in ((json_out, report.to_json), (junit, report.to_junit)):
        if path is not None:
            path.write_text(text(), encoding="utf-8")
    typer.echo(str(report))
    typer.echo(f"in {duration(time.perf_counter() - start)}", err=True)
    if report.broken:
        raise typer.Exit(1)


@app.command()
def compare(  # noqa: PLR0913 - one parameter for each option
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:NAME", help="A function, a module, or a function that makes one."),
    ],
    inputs: ManyInputs = None,
    backend: BackendName = "inductor",
    train: Train = False,
    no_grad: Annotated[bool, typer.Option("--no-grad", help="Run calls under torch.no_grad().")] = False,
    calls: Annotated[int, typer.Option(min=1, help="Calls that are checked, at least.")] = 3,
    rounds: Rounds = 50,
    timeout: Timeout = 600.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the data, too.")] = None,
) -> None:
    """Compares eager mode, torch.compile and this library.

    Each way runs in a process of its own: results over several calls, the first call with empty caches, a warm
    call, memory, graphs and graph breaks. The exit code is 1 if one of ours fails or differs from eager mode.
    """
    request = Request(target, inputs, backend, train, no_grad, calls)
    comparing.run(request, json_out, rounds=rounds, timeout=timeout)


@app.command()
def doctor(
    inductor: Annotated[bool, typer.Option(help="Compile with Inductor as well.")] = False,
) -> None:
    """Looks at versions, compiler, GPU, caches; tries a training step."""
    broken = False
    for finding in examine(inductor=inductor):
        typer.echo(f"{finding.state:<8} {finding.what:<20} {finding.detail}")
        broken |= finding.state == "broken"
    if broken:
        raise typer.Exit(1)


app.add_typer(packages.app, name="package")

# ------------------------------------------------------------------------------------------------- helpers


def check_makes_subclass(target: str, made: object) -> None:
    """Raises `TargetError` for a factory whose values the conformance kit cannot test."""
    if not (isinstance(made, torch.Tensor) and is_wrapper(made)):
        raise TargetError(
            f"expected {target} to make a tensor subclass that holds other tensors, got {type(made).__name__}"
        )
