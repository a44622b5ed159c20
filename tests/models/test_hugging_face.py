"""Hugging Face models, compiled: forwards with padding and caches, training steps, `generate`. Eager is the judge."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch

import desugar

pytest.importorskip("transformers", reason="needs the extra `models`")

from tests.models.judge import assert_same, gradients, state
from tests.models.zoo import ZOO, ids, mask

pytestmark = [
    pytest.mark.slow,
    # Dynamo traces through the caches of transformers' own questions about versions of packages.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

WAYS: dict[str, Any] = {
    "compile": lambda fn: desugar.compile(fn, backend="eager"),
    "dynamo": lambda fn: torch.compile(fn, backend="desugar", options={"backend": "eager"}),
    "stock": lambda fn: torch.compile(fn, backend="aot_eager"),
}
# MODELS_WAY=stock tells whether a failure is ours.
compiled = WAYS[os.environ.get("MODELS_WAY", "compile")]

# One of each kind, and those whose backward is special: functions with a backward of their own (bloom,
# recurrent_gemma), experts, scans, losses over pairs and over alignments.
TRAINED = """llama gemma2 gpt2 bloom mixtral switch_transformers mamba rwkv recurrent_gemma bert deberta_v2 convbert
    t5 bart vit swin convnext clip wav2vec2 whisper""".split()


@pytest.fixture(autouse=True)
def _is_compiled(caplog):
    """Checks that there were graphs, and that all of them are ours."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not [record.getMessage() for record in caplog.get_records("call") if record.name == "desugar"]


@pytest.mark.parametrize("name", ZOO)
def test_forwards(name):
    model = ZOO[name].build()
    other = copy.deepcopy(model)
    fast = compiled(other)
    known, known_fast = {}, {}
    with torch.no_grad():
        for call in ZOO[name].calls:
            kwargs, kwargs_fast = call(known), call(known_fast)
            want, got = model(**kwargs), fast(**kwargs_fast)
            assert_same(got, want)
            assert_same(kwargs_fast, kwargs)
            assert_same(state(other), state(model))
            known, known_fast = kwargs | dict(want), kwargs_fast | dict(got)


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step(name):
    model = ZOO[name].build()
    other = copy.deepcopy(model)
    fast = compiled(other)
    want, got = model(**ZOO[name].training()), fast(**ZOO[name].training())
    assert_same(got, want)
    want.loss.backward()
    got.loss.backward()
    assert_same(gradients(other), gradients(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "t5", "mamba"])
def test_generate(name):
    model = ZOO[name].build()
    other = copy.deepcopy(model)
    other.forward = compiled(other.forward)
    decoder_only = not model.config.is_encoder_decoder
    prompt = {"input_ids": ids(2, 7), "attention_mask": mask(2, 7, left=decoder_only)}
    want, got = (
        each.generate(**prompt, min_new_tokens=5, max_new_tokens=5, do_sample=False)
        for each in (model, other)
    )
    assert want.shape[1] == (12 if decoder_only else 6)
    assert_same(got, want)
