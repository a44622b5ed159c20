"""Fine-tuning by transformers: the ways agree, eager and compiled, and the script fails where one differs."""

import sys
from itertools import pairwise

import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

import finetune_hf as example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]
TINY = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 2048, "batch": 6, "longest": 40, "steps": 3}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", *(f"--{name}={x}" for name, x in TINY.items())])


@pytest.mark.parametrize("options", [[], ["--grouped"]], ids=str)
def test_the_report(options, capsys):
    sys.argv.extend(["--compile=eager", *options])
    example.main()
    caption, _, *lines = capsys.readouterr().out.splitlines()
    rows = {line[:20].strip(): [float(x) for x in line[20:].split()] for line in lines}
    assert ([*rows], caption.partition(";")[0]) == (
        [name + kind for kind in ("", ", compiled") for name in ("padded", "flattened", "ragged")],
        "3 batches of 6 paragraphs",
    )
    assert all(
        step > 0 and of_padded > 0 and memory >= 0 and loss == pytest.approx(rows["padded"][-1], rel=1e-4)
        for step, of_padded, _, memory, *_, loss in rows.values()
    )


def test_grouped_batches_have_similar_lengths():
    batches = example.draw_batches(example.argparse.Namespace(**example.OPTIONS, grouped=True))
    assert all(max(map(example.length, a)) <= min(map(example.length, b)) for a, b in pairwise(batches))


def test_a_prediction_of_another_paragraph_fails(monkeypatch):
    monkeypatch.setitem(
        example.COLLATORS,
        "flattened",
        lambda rows: (batch := example.flatten(rows)) | {"labels": batch["input_ids"]},
    )
    with pytest.raises(SystemExit, match=r"at step \d the loss is .* \(flattened\)"):
        example.main()
