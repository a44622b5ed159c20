"""Hugging Face models on ragged batches of tokens: each row as that row alone, and one program for ever-new lengths."""

import copy
import itertools

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import desugar
from subclasses.int8 import Int8WeightOnlyConfig, quantize_
from subclasses.ragged import JaggedTensor
from tests.tables import raising

pytest.importorskip("transformers", reason="needs the extra `models`")
from transformers.cache_utils import DynamicCache
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from subclasses.ragged.hugging_face import RaggedCache
from tests.models.text_models import (
    LAYOUTS,
    ROWS,
    TEXTS,
    TITLES,
    check_generation,
    check_rows,
    gradients_of,
    model_of,
    of_rows,
    running,
)
from tests.models.zoo import NO_DROPOUT, TINY, ZOO, build, ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # Inductor compiles whole models
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

layouts = pytest.mark.parametrize("layout", LAYOUTS)
BATCHES = [(7, 3, 5), (9, 2, 4, 6, 11), (30, 4), (12, 5, 2, 8), (2, 3, 4, 5, 6, 7, 16), (6, 13, 3)]
WIDE = TINY | NO_DROPOUT | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
MODELS = {
    "llama": lambda: build("LlamaForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "gpt2": lambda: build("GPT2LMHeadModel", WIDE),
    "bert": lambda: build("BertForMaskedLM", WIDE),
    "qwen2": lambda: build("Qwen2ForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "mistral": lambda: build("MistralForCausalLM", WIDE | {"num_key_value_heads": 2, "sliding_window": 4}),
    "roberta": lambda: build("RobertaForMaskedLM", WIDE),
    "phi3": lambda: build("Phi3ForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "mixtral": lambda: build("MixtralForCausalLM", WIDE | {"num_key_value_heads": 2, "num_local_experts": 4}),
}
GENERATES = """llama mistral qwen2 qwen3 gemma gemma3 phi phi3 gpt2 gpt_neox gpt_bigcode opt falcon stablelm cohere olmo
    starcoder2 mixtral t5 bart""".split()


# ---- each row as that row alone --------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize(("kind", "name"), running(*(kind for kind in TITLES if kind != "cached")))
def test_each_row_is_that_row_alone(kind, name, way, layout):
    """Its results, and the loss and each gradient of a batch, for all models that the page lists."""
    model, case = model_of(kind, name)
    call = desugar.compile(model, backend="eager") if way == "compiled" else model
    check_rows(model, call, layout, of_rows(model, case))


def built(name):
    """A model of the table, with int8 weights if its name says so."""
    model = ZOO[name.removeprefix("int8 ")].build()
    if name.startswith("int8 "):
        quantize_(model, Int8WeightOnlyConfig())
    return model


@layouts
@pytest.mark.parametrize("name", ["int8 llama", "int8 gpt2", "int8 bert"])
@torch.no_grad()
def test_int8_weights(name, layout):
    model = built(name)
    fast = desugar.compile(model, backend="eager")
    want = [model(input_ids=row[None]).logits[0] for row in ROWS]
    found = fast(input_ids=LAYOUTS[layout](ROWS)).logits
    torch.testing.assert_close(found.to_tensors(), want, atol=1e-5, rtol=1e-4)
    assert len(fast.programs) == 1


@torch.no_grad()
def test_the_loss_of_the_routers_is_that_of_all_tokens():
    model, tokens = ZOO["mixtral"].build(), JaggedTensor.from_tensors(ROWS)
    alone = [model(input_ids=row[None], output_router_logits=True).router_logits for row in ROWS]
    want = load_balancing_loss_func(tuple(map(torch.cat, zip(*alone, strict=True))), 4, 2)
    torch.testing.assert_close(model(input_ids=tokens, output_router_logits=True).aux_loss, want)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *itertools.product([*GENERATES, "int8 llama"], LAYOUTS),
        *itertools.product(["llama", "gpt2", "int8 llama"], ["cached"]),
    ],
)
def test_generate(name, layout, beams):
    """Each row equals the output for its prompt alone; a row ends behind its first end of text."""
    model, options = (
        built(name),
        {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "num_return_sequences": beams},
    )
    longest = model.generate(ROWS[0][None], min_new_tokens=6, **options)
    options["eos_token_id"] = options["pad_token_id"] = int(longest[0, -3])
    want = [row for prompt in ROWS for row in model.generate(prompt[None], **options)]
    cached = {"past_key_values": RaggedCache(model.config)} if layout == "cached" else {}
    got = model.generate(LAYOUTS.get(layout, JaggedTensor.from_tensors)(ROWS), **options, **cached)
    for one, other in zip(got.to_tensors(), want, strict=True):
        assert torch.equal(one, other[: len(one)]) and {*other[len(one) :].tolist()} <= {
            options["pad_token_id"]
        }


@pytest.mark.parametrize("layout", [*LAYOUTS, "cached"])
@pytest.mark.parametrize("count", [1, 3])
def test_sampling(count, layout):
    """The random numbers of one seed are the same as for the padded batch, so one prompt alone gets its own numbers."""
    model, rows, found = ZOO["llama"].build(), ROWS[:count], []
    # A processor of logits sees the padding of the table.
    options = {"do_sample": True, "no_repeat_ngram_size": 2, "pad_token_id": 7, "eos_token_id": None}
    table, ones = (
        pad_sequence(each, batch_first=True, padding_side="left", padding_value=value)
        for each, value in ((rows, 7), ([*map(torch.ones_like, rows)], 0))
    )
    ragged = {"input_ids": LAYOUTS.get(layout, JaggedTensor.from_tensors)(rows)}
    ragged |= {"past_key_values": RaggedCache(model.config)} if layout == "cached" else {}
    for prompts in (ragged, {"input_ids": table, "attention_mask": ones}):
        torch.manual_seed(0)
        found.append(model.generate(**prompts, max_new_tokens=6, **options))
    assert [row[-6:].tolist() for row in found[0].to_tensors()] == found[1][:, -6:].tolist()
    assert found[0].row_lengths().tolist() == [len(row) + 6 for row in rows]


@pytest.mark.parametrize(("cached", "beams"), [(False, 1), (False, 3), (True, 1), (True, 3)])
@pytest.mark.parametrize("name", ["llama", "int8 llama"])
def test_generate_compiled(name, cached, beams):
    model = built(name)
    fast = desugar.compile(model, backend="eager", dynamic=True)
    for lengths in BATCHES:
        prompts = JaggedTensor.from_tensors([ids(1, n, seed=n)[0] for n in lengths])
        options = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
        want = model.generate(prompts, **options)
        options |= {"past_key_values": RaggedCache(model.config)} if cached else {}
        assert torch.equal(want.values, fast.generate(prompts, **options).values)
    # For the prompts, and for one token more; beams repeat a cache of tables in one more.
    assert len(fast.programs) == 2 + (beams > 1 and not cached)


# ---- a ragged cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("_", "name"), running("cached"))
def test_generate_with_a_ragged_cache(_, name):
    check_generation(name)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_further_tokens(attention, way):
    """Rows of other lengths, one of none, then as many tokens for each row."""
    model = ZOO["llama"].build()
    model.set_attn_implementation(attention)
    call = desugar.compile(model, backend="eager") if way == "compiled" else model
    cache, cuts = RaggedCache(model.config), [*zip(ROWS, (5, 1, 5), strict=True)]
    parts = [row[:n] for row, n in cuts], [row[n:] for row, n in cuts]
    steps = *map(JaggedTensor.from_tensors, parts), ids(3, 2), ids(3, 1)
    found = [call(x, past_key_values=cache, position_ids=cache.positions(x)).logits.unbind(0) for x in steps]
    for tokens, logits in zip(zip(*parts, *steps[2:], strict=True), zip(*found, strict=True), strict=True):
        want = model(torch.cat(tokens)[None]).logits[0]
        torch.testing.assert_close(torch.cat(logits), want, atol=1e-5, rtol=1e-4)


def steps_of(*steps, model="llama", cache=lambda config: RaggedCache(config), **options):
    """Calls a model for each step, with one cache."""
    model = ZOO[model].build()
    cache = cache(model.config)
    return [model(step, past_key_values=cache, **options) for step in steps]


def scaled(kind, *rows, cache=None):
    """Calls a Llama whose positions of rows longer than 6 are scaled."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 6}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4} if kind == "longrope" else {}
    model = build("LlamaForCausalLM", TINY | {"rope_parameters": rope})
    return model(JaggedTensor.from_tensors(rows), past_key_values=cache and cache(model.config))


PROMPTS = JaggedTensor.from_tensors(ROWS)
test_what_is_refused = raising(
    [
        (lambda: steps_of(PROMPTS, ids(3, 1)), "no common length; pass position_ids=cache"),
        (lambda: steps_of(ids(3, 4)), "expected a JaggedTensor of prompts"),
        (lambda: steps_of(PROMPTS.to_padded()), "expected a JaggedTensor of prompts"),
        (lambda: steps_of(PROMPTS, model="mistral"), "got mistral with DynamicSlidingWindowLayer"),
        (lambda: steps_of(PROMPTS, model="t5"), "got t5 with an encoder"),
        (
            lambda: steps_of(
                PROMPTS, ids(3, 1), attention_mask=torch.ones(3, 8), position_ids=torch.arange(1)[None]
            ),
            "expected no attention_mask",
        ),
        (
            lambda: steps_of(PROMPTS, ids(3, 1), cache=lambda config: DynamicCache(config=config)),
            "would get wrong positions; pass past_key_values=RaggedCache",
        ),
        (
            lambda: ZOO["llama"].build().generate(PROMPTS, attention_mask=torch.ones(3, 7)),
            "beside ragged prompts; leave out",
        ),
        (
            lambda: ZOO["llama"].build().generate(PROMPTS, past_key_values=()),
            "beside ragged prompts; leave out",
        ),
        (
            lambda: (model := ZOO["llama"].build()).generate(
                PROMPTS, past_key_values=RaggedCache(model.config), use_cache=False, max_new_tokens=3
            ),
            "got 8; use_cache is off",
        ),
        (
            lambda: ZOO["llama"].build().generate(PROMPTS, negative_prompt_ids=PROMPTS[:, 1:]),
            "rows of negative_prompt_ids as long as the prompts",
        ),
        (
            lambda: ZOO["t5"].build().generate(PROMPTS, labels=PROMPTS),
            "expected no labels, which Seq2SeqTrainer passes",
        ),
        *[
            (
                lambda given=given: (model := ZOO["llama"].build()).generate(
                    PROMPTS, past_key_values=RaggedCache(model.config), **given
                ),
                f"expected no {next(iter(given))} beside a RaggedCache",
            )
            for given in ({"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 2})
        ],
        (
            lambda: ZOO["mixtral"].build()(PROMPTS.to_padded(), output_router_logits=True),
            "batch and ragged dimension stay",
        ),
        (lambda: ZOO["llama"].build()(PROMPTS, attention_mask=PROMPTS), "expected none, got rows; leave out"),
        (
            lambda: ZOO["llama"].build()(PROMPTS, attention_mask=PROMPTS.to_dense(0).flip(1).ne(0)),
            "got a zero, as of padding on the left; leave out attention_mask",
        ),
        *[
            (
                lambda kind=kind: scaled(kind, *ids(2, 8), ids(1, 3)[0]),
                "a row longer than 6 tokens changes the results of shorter rows",
            )
            for kind in ("longrope", "dynamic")
        ],
        (
            lambda: build("ModernBertForSequenceClassification", TINY | {"classifier_pooling": "mean"})(
                PROMPTS
            ),
            "divides the sum of each row by the longest row; pass attention_mask=rows.mask()",
        ),
        (
            lambda: RaggedCache(ZOO["llama"].build().config).row_lengths,
            "no rows yet; call the model with the",
        ),
        (
            lambda: build("Sam3LiteTextTextModel", TINY)(PROMPTS),
            "of the type 'resized', a row longer than 0 tokens changes the results of shorter rows",
        ),
        (
            lambda: scaled("longrope", *ids(2, 8), cache=RaggedCache),
            "positions that depend on the longest row",
        ),
    ]
)


@layouts
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_implementations_of_experts(experts, name, layout):
    model, _ = model_of("causal", name)
    want = of_rows(model, TEXTS["causal"])
    model.set_experts_implementation(experts)
    check_rows(model, model, layout, want)


# ---- one program for ever-new lengths and numbers of rows ------------------------------------------------------


@layouts
@pytest.mark.parametrize(
    ("name", "training"), [(name, True) for name in MODELS] + [("llama", False), ("gpt2", False)]
)
def test_one_program_for_ever_new_batches(name, training, layout, caplog):
    """A step in each batch; a padded batch has a size that `dynamic=True` makes a symbol at once.

    Attention has no mask, except for a sliding window.
    """
    model = MODELS[name]()
    other, counts = copy.deepcopy(model), []
    fast = desugar.compile(other, dynamic=True if layout == "padded" else None)
    for lengths in BATCHES:
        tokens, found = LAYOUTS[layout]([ids(1, n, seed=n)[0] for n in lengths]), []
        for each, call in ((model, model), (other, fast)):
            with torch.set_grad_enabled(training):
                out = call(input_ids=tokens, **({"labels": tokens} if training else {}))
            found.append((out.logits.detach().to_dense(), gradients_of(each, out.loss) if training else None))
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)
        counts.append(len(fast.programs))
    assert {*counts} == {2 if training and name == "gpt2" else 1}  # GPT-2 has a graph of its loss
    assert name == "mistral" or "attn_mask" not in caplog.text
