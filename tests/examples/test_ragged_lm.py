"""The language model that is trained in five ways, generates with buckets, is quantized and goes into a package.

Each script agrees, compiles little, and fails where it is wrong.
"""

import pytest
import torch

import generate_ragged_lm
import package_ragged_lm
import quantize_ragged_lm
import train_ragged_lm
from _language_model import LanguageModel, draw_batches, read_lines
from _report import Result, check_agreement
from subclasses.int8 import weight_bytes
from subclasses.ragged import PaddedTensor
from tests.examples.command import check_exits, run_command

SCRIPTS = {
    "generate": (generate_ragged_lm, "2", ["32 prompt lengths are served by 4 programs", "yes"]),
    "quantize": (quantize_ragged_lm, "2", [*quantize_ragged_lm.CONFIGS]),
    "package": (package_ragged_lm, "5", ["without the model's source"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_by_itself(name):
    example, steps, words = SCRIPTS[name]
    result = run_command(example.main, "--quick", "--steps", steps)
    assert result.exit_code == 0, result.output
    assert all(part in result.stdout for part in words)
    assert name != "generate" or (result.stdout.count("yes") == 4 and "NO" not in result.stdout)


@pytest.fixture
def model():
    return LanguageModel(dim=64, heads=2, layers=2, longest=48)


# ---- trained ---------------------------------------------------------------------------------------------------

WAYS = [
    "dense, eager",
    "dense, torch.compile",
    "jagged, eager",
    "jagged, torch.compile",
    "jagged, desugar.compile",
]


def train(folder):
    """Runs the demo in its quick form; the picture goes to a folder."""
    options = ["--quick", "--steps", "4", "--batch", "6", "--out", str(folder / "demo.png")]
    return run_command(train_ragged_lm.main, *options)


def wrong_targets(rows):
    """As `jagged`, but each row's last target is off by one."""
    tokens, targets = train_ragged_lm.jagged(rows)
    targets.values[-1] += 1
    return tokens, targets


@pytest.mark.slow
def test_the_five_ways_agree_and_compile_at_most_two_programs(tmp_path):
    result = train(tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.partition("Prompts of")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if "│" in line]
    assert [row[0] for row in rows] == WAYS
    assert "4 batches of" in result.stdout and "% of a padded batch is real" in result.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name, step_time, tokens_per_second, loss, programs in rows:
        assert float(step_time) > 0 and float(tokens_per_second.replace(",", "")) > 0
        assert float(loss) == pytest.approx(float(rows[0][3]), rel=1e-4)
        assert int(programs) == 0 if "eager" in name else 1 <= int(programs) <= 2, name
    assert "32 prompt lengths are served by 4 programs" in result.stdout


def test_a_way_that_computes_something_else_fails_the_script(tmp_path, monkeypatch):
    right = train_ragged_lm.make_ways

    def make_ways(*args):
        reference, _, wrong, *_ = right(*args)
        wrong.layout = wrong_targets
        return [reference, wrong]

    monkeypatch.setattr(train_ragged_lm, "make_ways", make_ways)
    result = train(tmp_path)
    assert result.exit_code == 1
    assert "The ways disagree: at step 0" in result.stderr and "(jagged, eager)" in result.stderr


def test_agreement_is_up_to_rounding(capsys):
    results = [
        Result(str(x), [4.0, x], [1.0] * 2, tokens=1, programs=0) for x in (3.0, 3.000002, 3.001, torch.nan)
    ]
    check_agreement(results[:2])
    for wrong in results[2:]:
        check_exits(capsys, "at step 1", check_agreement, [results[0], wrong])


@pytest.mark.slow
def test_batches_are_real_lines_and_an_epoch_ends_with_a_short_one():
    lines = read_lines(longest=100)
    assert len(lines) > 10_000 and max(map(len, lines)) == 102  # "\n" before and after
    batches = draw_batches(lines, batch=9, seed=0)
    assert [len(next(batches)) for _ in range(11)] == [9] * 9 + [6, 9]


def test_padding_is_left_out_of_the_loss(model):
    rows = read_lines(longest=20)[:5]
    each = torch.stack([model(*train_ragged_lm.dense([row])) * (len(row) - 1) for row in rows])
    torch.testing.assert_close(
        model(*train_ragged_lm.dense(rows)), each.sum() / sum(len(row) - 1 for row in rows)
    )


# ---- failures --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PaddedTensor, "to_tensors", lambda x: [row + 1 for row in x.padded]),
        (
            generate_ragged_lm.desugar,
            "compile",
            lambda fn, compile_one=generate_ragged_lm.desugar.compile, **_: compile_one(fn, backend="eager"),
        ),
    ],
    ids=["a row that is not its own", "too many programs"],
)
def test_a_generation_that_is_wrong_fails(owner, name, wrong, model, monkeypatch, capsys):
    monkeypatch.setattr(owner, name, wrong)
    check_exits(capsys, "went wrong", generate_ragged_lm.generate_by_bucket, model, "eager")


@pytest.mark.slow
def test_a_model_that_got_worse_fails(model, monkeypatch, capsys):
    monkeypatch.setattr(quantize_ragged_lm, "WORST_LOSS", -0.5)
    monkeypatch.setattr(quantize_ragged_lm, "ROUNDS", 1)
    batch = next(draw_batches(read_lines(48), 16, 0))
    check_exits(capsys, "worse", quantize_ragged_lm.compare_quantized, model, batch, "eager")


@pytest.mark.slow
def test_a_package_that_computes_something_else_fails(monkeypatch):
    wrong = {"rows": [], "losses": [0.0] * 4, "seconds": 0.0, "has": []}
    monkeypatch.setattr(package_ragged_lm, "save_packages", lambda *_: None)
    monkeypatch.setattr(package_ragged_lm, "run_client", lambda *_: wrong)
    made = run_command(package_ragged_lm.main, "--quick", "--steps", "1")
    assert made.exit_code != 0 and "The packages went wrong" in made.output


# ---- generating and quantized ----------------------------------------------------------------------------------


def test_prompts_are_of_all_lengths(model):
    assert len(generate_ragged_lm.PROMPT) >= generate_ragged_lm.LONGEST
    prompts = [torch.tensor(list(generate_ragged_lm.PROMPT[:n])) for n in (3, 1)]
    with torch.no_grad():
        together = generate_ragged_lm.continue_batch(lambda t: model.logits(t)[:, -1].argmax(-1), prompts)
    assert [len(row) for row in together] == [33, 31]
    torch.testing.assert_close([row[: len(p)] for row, p in zip(together, prompts, strict=True)], prompts)


def test_the_model_itself_stays_as_it_is(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    for config in list(quantize_ragged_lm.CONFIGS.values())[1:]:
        assert weight_bytes(quantize_ragged_lm.quantized(model, config)) < 0.4 * weight_bytes(model)
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)
