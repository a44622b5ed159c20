"""Programs of torch.export do what eager mode does, with other sizes than those that were exported."""

import pytest

from subclasses import export
from tests.export import table
from tests.export.cases import CASES, MISFIT, UNFLATTENED, WHOLE
from tests.export.outcomes import FORMS, RIGHT, STEPS, export_case, quiet, run_case
from tests.export.table import options_of
from tests.tables import giving

WITHOUT_INDUCTOR = STEPS[:-1]
OFTEN = [
    f"{UNFLATTENED}: `Int8Tensor` weights and activations, another batch",
    f"{UNFLATTENED}: `JaggedTensor` made inside",
    f"{WHOLE}: `JaggedTensor` and its result",
    f"{WHOLE}: `JaggedTensor`, attention",
    f"{WHOLE}: `PaddedTensor`, another width and batch",
    f"{WHOLE}: `KeyedJaggedTensor`, embedding bags",
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", OFTEN)
def test_each_form_of_a_program(name):
    found = run_case(CASES[name], strict=False, steps=WITHOUT_INDUCTOR, **options_of(name))
    assert found == dict.fromkeys(WITHOUT_INDUCTOR, RIGHT)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [name for name in OFTEN if "Keyed" not in name][::2])
def test_what_dynamo_captured_first(name):
    steps = WITHOUT_INDUCTOR[:2]
    assert run_case(CASES[name], strict=True, steps=steps, **options_of(name)) == dict.fromkeys(steps, RIGHT)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(MISFIT)])
def test_a_call_that_does_not_fit(name):
    found = run_case(CASES[name], strict=False, steps=("export", "module"), **options_of(name))
    assert [kind for kind, _ in found.values()] == ["right", "refused"]


@pytest.mark.slow
def test_aotinductor_checks_sizes_if_it_is_told_to(monkeypatch):
    case = CASES[f"{MISFIT}: `PaddedTensor` of another width than the exported one"]
    args, misfit = export.flatten(case.traced()), export.flatten(case.later())
    with quiet():
        module = case.make().eval()
        library = FORMS["AOTInductor"](export_case(case, module, flattened=True, strict=False))
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    library(*args)
    with pytest.raises(RuntimeError):
        library(*misfit)


# ---- docs/export.md ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it compiles each case ahead of time
def test_the_page_shows_what_torch_export_does():
    found = table.emit_section(table.outcomes(list(CASES)))
    assert table.read_section(table.PAGE.read_text()) == found, "python -m tests.export.table writes it"


test_what_the_page_says = giving(
    {
        "a row for each case": (lambda: list(table.TABLE.cells()), list(CASES)),
        "silently wrong is what AOTInductor does not check": (
            lambda: {
                (name, column)
                for name, cells in table.TABLE.cells().items()
                for column, cell in cells.items()
                if "wrong" in cell
            },
            {(name, "AOTInductor") for name in CASES if name.startswith(MISFIT)},
        ),
    }
)
