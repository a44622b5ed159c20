"""LoRA adapters of peft: trained beside plain and int8 weights, and switched, in a compiled model."""

import copy

import pytest
import torch

import desugar
from subclasses.int8 import Int8Tensor, Int8WeightOnlyConfig, quantize_

pytest.importorskip("transformers", reason="needs the extra `models`")

from tests.models.judge import assert_same, gradients
from tests.models.zoo import ZOO
from tests.tables import raising

peft = pytest.importorskip("peft", reason="needs the extra `models`")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # peft calls it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


def with_adapters(name, weights):
    """A model with two adapters; weights are quantized before they are added, or after, or not."""
    model = ZOO[name].build()
    if weights == "int8 before":
        quantize_(model, Int8WeightOnlyConfig())
    config = peft.LoraConfig(
        r=4, target_modules=TARGETS[name], init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    model = peft.get_peft_model(model, config)
    model.add_adapter("second", config)
    if weights == "int8 after":
        quantize_(model, Int8WeightOnlyConfig())
    found = {n for n, p in model.named_parameters() if isinstance(p.data, Int8Tensor)}
    assert bool(found) == (weights != "plain") and not any("lora" in n for n in found)
    model.set_adapter("default")
    return model


@pytest.mark.parametrize("weights", ["plain", "int8 before", "int8 after"])
@pytest.mark.parametrize("name", TARGETS)
def test_train_and_switch(name, weights):
    model = with_adapters(name, weights)
    other = copy.deepcopy(model)
    fast = desugar.compile(other, backend="eager")
    batch = ZOO[name].training()
    for call in (model, fast):
        call(**batch).loss.backward()
    assert_same(gradients(other), gradients(model))
    assert {n.split(".")[-2] for n, g in gradients(model).items() if g is not None} == {"default"}
    seen = []
    with torch.no_grad():
        for _ in range(2):
            for adapter in ("default", "second"):
                model.set_adapter(adapter)
                other.set_adapter(adapter)
                seen.append(model(**batch).logits)
                assert_same(fast(**batch).logits, seen[-1])
            with model.disable_adapter(), other.disable_adapter():
                seen.append(model(**batch).logits)
                assert_same(fast(**batch).logits, seen[-1])
            compiled, count = fast.programs, len(seen)
    assert count == 6 and not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[0], seen[2])
    assert torch.equal(seen[0], seen[3]) and len(compiled) <= 8


test_merging_into_int8_weights_is_refused = raising(
    [(lambda: with_adapters("llama", "int8 before").merge_adapter(), "writes to an Int8Tensor")]
)
