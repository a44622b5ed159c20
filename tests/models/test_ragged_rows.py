"""Hugging Face models on ragged batches of tokens: each row as that row alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import desugar
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor, PaddedTensor

pytest.importorskip("transformers", reason="needs the extra `models`")

from tests.models.judge import gradients
from tests.models.zoo import ZOO, ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

LAYOUTS = {
    "jagged": JaggedTensor.from_tensors,
    "padded": functools.partial(PaddedTensor.from_tensors, multiple=8),
}
ROWS = [ids(1, length, seed=length)[0] for length in (7, 3, 5)]
CAUSAL = """llama mistral qwen2 qwen3 gemma gemma3 phi phi3 gpt2 gpt_neox gpt_bigcode opt falcon stablelm cohere olmo
    starcoder2""".split()
MASKED = ["bert", "distilbert", "albert", "electra", "modernbert"]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CAUSAL + MASKED)
def test_each_row_is_that_row_alone(name, layout):
    model = ZOO[name].build()
    with torch.no_grad():
        check_rows(model, model(input_ids=LAYOUTS[layout](ROWS)).logits)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_compiled(name, layout, int8):
    model = ZOO[name].build()
    if int8:
        quantize_(model, Int8WeightOnlyConfig())
    fast = desugar.compile(model, backend="eager")
    with torch.no_grad():
        check_rows(model, fast(input_ids=LAYOUTS[layout](ROWS)).logits)
    assert len(fast.programs) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_training_step(name, layout):
    model = ZOO[name].build()
    other, fast = copy.deepcopy(model), copy.deepcopy(model)
    tokens = LAYOUTS[layout](ROWS)
    counts = [len(row) - (name != "bert") for row in ROWS]  # a causal model has no target for a first token
    losses = [
        model(input_ids=row[None], labels=row[None]).loss * n for row, n in zip(ROWS, counts, strict=True)
    ]
    want = sum(losses) / sum(counts)
    want.backward()
    for each, call in ((other, other), (fast, desugar.compile(fast, backend="eager"))):
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(gradients(each), gradients(model), atol=1e-5, rtol=1e-4)
    assert len(call.programs) == (
        2 if name == "gpt2" else 1
    )  # its loss is a graph of its own on dense tokens too


@pytest.mark.parametrize("layout", LAYOUTS)
def test_further_tokens_with_a_ragged_cache_are_refused(layout):
    model = ZOO["llama"].build()
    with torch.no_grad():
        cache = model(input_ids=LAYOUTS[layout](ROWS)).past_key_values
        for further in (ids(3, 1), LAYOUTS[layout](list(ids(3, 1)))):
            with pytest.raises(NotImplementedError, match="would get wrong positions; pass whole rows"):
                model(input_ids=further, past_key_values=cache)


def check_rows(model, logits):
    for got, row in zip(logits.to_tensors(), ROWS, strict=True):
        torch.testing.assert_close(got, model(input_ids=row[None]).logits[0], atol=1e-5, rtol=1e-4)
