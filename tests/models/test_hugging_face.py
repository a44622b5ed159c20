"""Hugging Face models, compiled: forwards with padding and caches, training steps, `generate`. Eager is the judge.

Each model has plain weights, and int8 weights.
"""

import copy
import gc
import os

import pytest
import torch

from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_

pytest.importorskip("transformers", reason="needs the extra `models`")

from tests.doors import COMPILED
from tests.models.judge import assert_same, check_step, state
from tests.models.zoo import ZOO, ids, mask

pytestmark = [
    pytest.mark.slow,
    # Dynamo traces through the caches of transformers' own questions about versions of packages.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

# MODELS_WAY=stock tells whether a failure is ours.
compiled = COMPILED[os.environ.get("MODELS_WAY", "desugar")]


def quantized(name):
    """A model of the zoo with int8 weights."""
    model = ZOO[name].build()
    if name == "rwkv":
        model.config.rescale_every = 0  # otherwise a first evaluation divides weights in place
    quantize_(model, Int8WeightOnlyConfig())
    assert any(isinstance(p.data, Int8Tensor) for p in model.parameters())
    return model


BUILD = {"plain": lambda name: ZOO[name].build(), "int8": quantized}


@pytest.fixture(autouse=True)
def _is_compiled(caplog):
    """Checks that there were graphs, and that all of them are ours."""
    gc.collect()  # frees Dynamo's weak references to weights, which `Module.to` in a forward refuses
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


def check_training_step(model, name):
    gc.collect()
    other = copy.deepcopy(model)
    check_step(
        model, other, compiled(other), lambda call: call(**ZOO[name].training()), lambda output: output.loss
    )


@pytest.mark.parametrize("name", ZOO)
def test_a_training_step(name):
    check_training_step(ZOO[name].build(), name)


@pytest.mark.parametrize("name", ZOO)
def test_int8_weights(name):
    model = quantized(name)
    other = copy.deepcopy(model)
    with torch.no_grad():
        got, want = (call(**ZOO[name].calls[0]({})) for call in (compiled(other), model))
    assert_same(got, want)
    assert_same(state(other), state(model))
    check_training_step(model, name)


CACHES = [(name, "static") for name in ("llama", "gpt2", "gemma2", "qwen3", "mixtral", "t5")]


@pytest.mark.parametrize("weights", BUILD)
@pytest.mark.parametrize(  # the state of Mamba has one size in any cache
    ("name", "cache"), [*CACHES, *((name, "dynamic") for name in [*dict(CACHES), "mamba"])]
)
def test_generate(name, cache, weights):
    model = BUILD[weights](name)
    other, calls = copy.deepcopy(model), []
    other.forward = fast = compiled(other.forward)
    other.register_forward_hook(lambda *_: calls.append("forward"))
    decoder_only = not model.config.is_encoder_decoder
    prompt = {"input_ids": ids(2, 7), "attention_mask": mask(2, 7, left=decoder_only)}
    if cache == "static":
        prompt["cache_implementation"] = "static"
    want, got = (
        each.generate(**prompt, min_new_tokens=5, max_new_tokens=5, do_sample=False)
        for each in (model, other)
    )
    assert want.shape[1] == (12 if decoder_only else 6)
    assert_same(got, want)
    assert calls == ["forward"] * 5
    assert len(getattr(fast, "programs", ())) <= 3


@pytest.mark.skipif(
    os.environ.get("MODELS_WAY", "desugar") != "desugar",
    reason="a module made by torch.compile generates with the one behind it",
)
@pytest.mark.parametrize("weights", BUILD)
def test_generate_of_a_compiled_module(weights):
    model = BUILD[weights]("llama")
    fast = compiled(copy.deepcopy(model))
    prompt = {"input_ids": ids(2, 7), "max_new_tokens": 5, "do_sample": False}
    assert_same(fast.generate(**prompt), model.generate(**prompt))
    assert 1 <= len(fast.programs) <= 3
