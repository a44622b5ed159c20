"""The demo in its quick form: it agrees, it compiles little, and it fails when a way is wrong."""

from __future__ import annotations

import pytest
import torch

import train_ragged_lm as example
from _report import Result, check_agreement
from tests.examples.command import check_exits, run_command

WAYS = [
    "dense, eager",
    "dense, torch.compile",
    "jagged, eager",
    "jagged, torch.compile",
    "jagged, desugar.compile",
]


@pytest.fixture
def run(tmp_path):
    """Runs the demo in its quick form; the picture goes to `tmp_path`."""
    options = ["--quick", "--steps", "4", "--batch", "6", "--out", str(tmp_path / "demo.png")]
    return lambda: run_command(example.main, *options)


def table_rows(text: str) -> dict[str, list[str]]:
    """The cells of each row of the printed table, by the name of the way."""
    lines = (line.strip("│ ").split("│") for line in text.splitlines() if "│" in line)
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def wrong_targets(rows):
    """As `jagged`, but each row's last target is off by one."""
    tokens, targets = example.jagged(rows)
    targets.values[-1] += 1
    return tokens, targets


# ---------------------------------------------------------------------------------------------------------
# the script
# ---------------------------------------------------------------------------------------------------------


def test_the_five_ways_agree_and_compile_at_most_two_programs(run, tmp_path):
    result = run()
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout.partition("Prompts of")[0])
    assert list(rows) == WAYS
    assert "4 batches of" in result.stdout and "% of a padded batch is real" in result.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name, (step_time, tokens_per_second, loss, programs) in rows.items():
        assert float(step_time) > 0 and float(tokens_per_second.replace(",", "")) > 0
        assert float(loss) == pytest.approx(float(rows["dense, eager"][2]), rel=1e-4)
        assert int(programs) == 0 if "eager" in name else 1 <= int(programs) <= 2, name
    assert "32 prompt lengths are served by 4 programs" in result.stdout


@pytest.mark.slow
def test_a_way_that_computes_something_else_fails_the_script(run, monkeypatch):
    right = example.make_ways

    def make_ways(*args):
        reference, _, wrong, *_ = right(*args)
        wrong.layout = wrong_targets
        return [reference, wrong]

    monkeypatch.setattr(example, "make_ways", make_ways)
    result = run()
    assert result.exit_code == 1
    assert "The ways disagree: at step 0" in result.stderr and "(jagged, eager)" in result.stderr


# ---------------------------------------------------------------------------------------------------------
# its parts
# ---------------------------------------------------------------------------------------------------------


def make_result(name, losses):
    return Result(name, losses, seconds=[1.0] * len(losses), tokens=1, programs=0)


def test_agreement_is_up_to_rounding(capsys):
    reference = make_result("a", [4.0, 3.0])
    check_agreement([reference, make_result("b", [4.0, 3.000002])])
    for wrong in (3.001, float("nan")):
        check_exits(capsys, "at step 1", check_agreement, [reference, make_result("b", [4.0, wrong])])


@pytest.mark.slow
def test_batches_are_real_lines_and_an_epoch_ends_with_a_short_one():
    lines = example.read_lines(longest=100)
    assert len(lines) > 10_000 and max(map(len, lines)) == 102  # "\n" before and after
    batches = example.draw_batches(lines, batch=9, seed=0)
    assert [len(next(batches)) for _ in range(11)] == [9] * 9 + [6, 9]


def test_padding_is_left_out_of_the_loss():
    torch.manual_seed(0)
    model = example.LanguageModel(dim=8, heads=2, layers=1, longest=20)
    rows = example.read_lines(longest=20)[:5]
    each = torch.stack([model(*example.dense([row])) * (len(row) - 1) for row in rows])
    together = model(*example.dense(rows))
    torch.testing.assert_close(together, each.sum() / sum(len(row) - 1 for row in rows))
