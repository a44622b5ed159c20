"""Hugging Face models on ragged batches of tokens: each row as that row alone, and one program for ever-new lengths."""

import copy
import functools

import pytest
import torch

import desugar
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor, PaddedTensor

pytest.importorskip("transformers", reason="needs the extra `models`")
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.models.judge import gradients
from tests.models.zoo import MIXTURES, TINY, ZOO, build, ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # Inductor compiles whole models
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

LAYOUTS = {
    "jagged": JaggedTensor.from_tensors,
    "padded": functools.partial(PaddedTensor.from_tensors, multiple=8),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
CAUSAL = """llama mistral qwen2 qwen3 gemma gemma3 phi phi3 gpt2 gpt_neox gpt_bigcode opt falcon stablelm cohere olmo
    starcoder2""".split()
EXPERTS = ["mixtral", "qwen2_moe", *MIXTURES]
KINDS = ["eager", "batched_mm", "grouped_mm"]
MASKED = ["bert", "distilbert", "albert", "electra", "modernbert"]
BATCHES = [(7, 3, 5), (9, 2, 4, 6, 11), (30, 4), (12, 5, 2, 8), (2, 3, 4, 5, 6, 7, 16), (6, 13, 3)]
NO_DROPOUT = dict.fromkeys(
    "attn_pdrop resid_pdrop embd_pdrop hidden_dropout_prob attention_probs_dropout_prob".split(), 0.0
)
WIDE = TINY | NO_DROPOUT | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
MODELS = {
    "llama": lambda: build("LlamaForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "gpt2": lambda: build("GPT2LMHeadModel", WIDE),
    "bert": lambda: build("BertForMaskedLM", WIDE),
    "qwen2": lambda: build("Qwen2ForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "mistral": lambda: build("MistralForCausalLM", WIDE | {"num_key_value_heads": 2, "sliding_window": 4}),
    "mixtral": lambda: build("MixtralForCausalLM", WIDE | {"num_key_value_heads": 2, "num_local_experts": 4}),
}
COMPILED = [("llama", "inductor"), ("gpt2", "inductor")]
TRACED = [(name, "eager") for name in ("bert", "qwen2", "mistral", "mixtral")]
GPT2_HAS_A_GRAPH_OF_ITS_LOSS = {"gpt2": 2}  # on dense tokens, too


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()


def rows_of(lengths):
    return [ids(1, length, seed=length)[0] for length in lengths]


ROWS = rows_of(BATCHES[0])

# ---- each row as that row alone --------------------------------------------------------------------------------


def check_rows(model, logits):
    for got, row in zip(logits.to_tensors(), ROWS, strict=True):
        torch.testing.assert_close(got, model(input_ids=row[None]).logits[0], atol=1e-5, rtol=1e-4)


@layouts
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, None) for name in CAUSAL + MASKED + EXPERTS] + [("mixtral", kind) for kind in KINDS],
)
@torch.no_grad()
def test_each_row_is_that_row_alone(name, kind, layout):
    model = (ZOO | MIXTURES)[name].build()
    if kind is not None:
        model.set_experts_implementation(kind)
    check_rows(model, model(input_ids=LAYOUTS[layout](ROWS)).logits)


@pytest.mark.parametrize("int8", [False, True])
@layouts
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@torch.no_grad()
def test_compiled(name, layout, int8):
    model = ZOO[name].build()
    if int8:
        quantize_(model, Int8WeightOnlyConfig())
    fast = desugar.compile(model, backend="eager")
    check_rows(model, fast(input_ids=LAYOUTS[layout](ROWS)).logits)
    assert len(fast.programs) == 1


@layouts
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "glm4_moe"])
def test_a_training_step(name, layout):
    models = [(ZOO | MIXTURES)[name].build() for _ in range(3)]
    fast = desugar.compile(models[2], backend="eager")
    counts = [len(row) - (name != "bert") for row in ROWS]  # a causal model has no target for a first token
    pairs = zip(ROWS, counts, strict=True)
    want = sum(models[0](input_ids=row[None], labels=row[None]).loss * n for row, n in pairs) / sum(counts)
    tokens = LAYOUTS[layout](ROWS)
    for loss in (want, *(call(input_ids=tokens, labels=tokens).loss for call in (models[1], fast))):
        loss.backward()
        torch.testing.assert_close(loss, want)
    for each in models[1:]:
        torch.testing.assert_close(gradients(each), gradients(models[0]), atol=1e-5, rtol=1e-4)
    assert len(fast.programs) == GPT2_HAS_A_GRAPH_OF_ITS_LOSS.get(name, 1)


@torch.no_grad()
def test_the_loss_of_the_routers_is_that_of_all_tokens():
    model, tokens = ZOO["mixtral"].build(), JaggedTensor.from_tensors(ROWS)
    of_rows = [model(input_ids=row[None], output_router_logits=True).router_logits for row in ROWS]
    want = load_balancing_loss_func(tuple(map(torch.cat, zip(*of_rows, strict=True))), 4, 2)
    torch.testing.assert_close(model(input_ids=tokens, output_router_logits=True).aux_loss, want)
    with pytest.raises(NotImplementedError, match="batch and ragged dimension stay"):
        model(input_ids=tokens.to_padded(), output_router_logits=True)


@layouts
@torch.no_grad()
def test_further_tokens_with_a_ragged_cache_are_refused(layout):
    model = ZOO["llama"].build()
    cache = model(input_ids=LAYOUTS[layout](ROWS)).past_key_values
    for further in (ids(3, 1), LAYOUTS[layout](list(ids(3, 1)))):
        with pytest.raises(NotImplementedError, match="would get wrong positions; pass whole rows"):
            model(input_ids=further, past_key_values=cache)


# ---- one program for ever-new lengths and numbers of rows ------------------------------------------------------


@layouts
@pytest.mark.parametrize(("name", "backend"), [*COMPILED, *TRACED])
def test_one_program_for_ever_new_batches(name, backend, layout, caplog):
    """A training step in each batch; a padded batch has a size that `dynamic=True` makes a symbol at once.

    Attention has no mask but that of a sliding window.
    """
    model = MODELS[name]()
    other, counts = copy.deepcopy(model), []
    fast = desugar.compile(other, backend=backend, dynamic=True if layout == "padded" else None)
    for lengths in BATCHES:
        tokens, losses = LAYOUTS[layout](rows_of(lengths)), []
        for each, call in ((model, model), (other, fast)):
            each.zero_grad()
            losses.append(call(input_ids=tokens, labels=tokens).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(gradients(other), gradients(model), atol=1e-4, rtol=1e-3)
        counts.append(len(fast.programs))
    assert {*counts} == {GPT2_HAS_A_GRAPH_OF_ITS_LOSS.get(name, 1)}
    assert name == "mistral" or "attn_mask" not in caplog.text


@layouts
@pytest.mark.parametrize(("name", "backend"), COMPILED)
@torch.no_grad()
def test_one_program_for_ever_new_batches_without_gradients(name, backend, layout):
    model = MODELS[name]()
    fast = desugar.compile(model, backend=backend, dynamic=True if layout == "padded" else None)
    for lengths in BATCHES:
        tokens = LAYOUTS[layout](rows_of(lengths))
        got, want = (call(input_ids=tokens).logits.to_dense() for call in (fast, model))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    assert len(fast.programs) == 1
