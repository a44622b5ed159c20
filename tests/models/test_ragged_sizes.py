"""Hugging Face models on ragged batches of ever-new lengths and numbers of rows: one program serves them all."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import desugar
from subclasses.ragged import JaggedTensor, PaddedTensor

pytest.importorskip("transformers", reason="needs the extra `models`")

from tests.models.judge import gradients
from tests.models.zoo import TINY, build, ids

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # Inductor compiles whole models
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

LAYOUTS = {
    "jagged": JaggedTensor.from_tensors,
    "padded": functools.partial(PaddedTensor.from_tensors, multiple=8),
}
BATCHES = [(7, 3, 5), (9, 2, 4, 6, 11), (30, 4), (12, 5, 2, 8), (2, 3, 4, 5, 6, 7, 16), (6, 13, 3)]
WIDE = TINY | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
MODELS = {
    "llama": lambda: build("LlamaForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "gpt2": lambda: build("GPT2LMHeadModel", WIDE),
    "bert": lambda: build("BertForMaskedLM", WIDE),
    "qwen2": lambda: build("Qwen2ForCausalLM", WIDE | {"num_key_value_heads": 2}),
    "mistral": lambda: build("MistralForCausalLM", WIDE | {"num_key_value_heads": 2, "sliding_window": 4}),
}
COMPILED = [("llama", "inductor"), ("gpt2", "inductor")]
TRACED = [(name, "eager") for name in ("bert", "qwen2", "mistral")]


@pytest.fixture(autouse=True)
def _reset():
    torch.compiler.reset()


def rows(lengths):
    return [ids(1, length, seed=length)[0] for length in lengths]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "backend"), [*COMPILED, *TRACED])
def test_one_program_for_ever_new_batches(name, backend, layout):
    """A training step in each batch; a padded batch has a size that `dynamic=True` makes a symbol at once."""
    model = MODELS[name]()
    other = copy.deepcopy(model)
    fast = desugar.compile(other, backend=backend, dynamic=True if layout == "padded" else None)
    first = 0
    for lengths in BATCHES:
        tokens = LAYOUTS[layout](rows(lengths))
        losses = []
        for each, call in ((model, model), (other, fast)):
            each.zero_grad()
            losses.append(call(input_ids=tokens, labels=tokens).loss)
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(gradients(other), gradients(model), atol=1e-4, rtol=1e-3)
        first = first or len(fast.programs)
    # The loss of GPT-2 is a graph of its own on dense tokens, too.
    assert len(fast.programs) == first == (2 if name == "gpt2" else 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_one_program_for_ever_new_batches_without_gradients(name, backend, layout):
    model = MODELS[name]()
    fast = desugar.compile(model, backend=backend, dynamic=True if layout == "padded" else None)
    with torch.no_grad():
        for lengths in BATCHES:
            tokens = LAYOUTS[layout](rows(lengths))
            got, want = fast(input_ids=tokens).logits, model(input_ids=tokens).logits
            torch.testing.assert_close(got.to_dense(), want.to_dense(), atol=1e-4, rtol=1e-3)
    assert len(fast.programs) == 1


@pytest.mark.parametrize("steps", [1, 2])
def test_trainer(steps, tmp_path):
    """A program for training and one for evaluation, whose last batches are smaller."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    from transformers import Trainer, TrainingArguments

    def collate(items):
        tokens = JaggedTensor.from_tensors([item["row"] for item in items])
        return {"input_ids": tokens, "labels": tokens}

    fast = desugar.compile(MODELS["llama"](), backend="eager")
    data = [{"row": row} for row in rows([length for lengths in BATCHES for length in lengths][:19])]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=steps,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    Trainer(fast, arguments, train_dataset=data, eval_dataset=data[:8], data_collator=collate).train()
    assert len(fast.programs) == 2
