"""Which language models of transformers take ragged rows; writes the lists of docs/hugging-face.md.

python -m tests.models.text_models          # some ten minutes
python -m tests.models.text_models bert     # prints what came of the models with such a name

A model runs if each row has the logits of that row alone, and the loss of a batch the gradients of the losses of its
rows, in both layouts.
"""

import functools
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from docs.wrap import wrap
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.models.judge import gradients
from tests.models.zoo import MIXTURES, NO_DROPOUT, TINY, ZOO, build, ids

PAGE = Path(__file__).parents[2] / "docs" / "hugging-face.md"
BEGIN, END = "<!-- written by python -m tests.models.text_models -->", "<!-- end -->"
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
LAYOUTS = {
    "jagged": JaggedTensor.from_tensors,
    "padded": functools.partial(PaddedTensor.from_tensors, multiple=8),
}
ROWS = [ids(1, length, seed=length)[0] for length in (7, 3, 5)]
LARGEST = 20_000_000  # parameters; a model that reads other names for its sizes is larger
EXPERTS = dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4) | {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GROUPED = {"num_key_value_heads": 2}
SIZES = [GROUPED | {"head_dim": 8}, GROUPED, {}, GROUPED | {"head_dim": 8} | EXPERTS]
# What a model does that rows refuse, by a word of the error.
REASONS = {
    "two ragged dimensions": "attention by hand, not by `scaled_dot_product_attention`",
    "cannot view": "a view that merges rows with heads or features",
    "copy_": "a state of one size for all rows",
    "__setitem__": "a write of rows into a dense tensor",
    "gather": "a dense index, one place for each row",
    "scatter": "a scatter into rows",
    "pad": "an entry before the first, or behind the last one, of a short row",
}


def build_text_model(kind, name):
    """A tiny model without dropout, by the first sizes that it takes."""
    model_name = KINDS[kind][name]
    known = (ZOO | MIXTURES).get(name)
    if known is not None and type(model := known.build()).__name__ == model_name:
        return model
    cls, error = getattr(transformers, model_name), None
    for sizes in SIZES:
        try:
            with torch.device("meta"):
                size = cls._from_config(cls.config_class(**TINY | NO_DROPOUT | sizes)).num_parameters()
            if size < LARGEST:
                return build(model_name, TINY | NO_DROPOUT | sizes)
        except Exception as refused:  # noqa: BLE001 - a configuration may raise anything
            error = refused
    raise LookupError(f"{name}: no small model: {error}")


def of_rows(model, kind):
    """The logits of each row alone, the loss of all rows, and its gradients."""
    with torch.no_grad():
        logits = [model(input_ids=row[None]).logits[0] for row in ROWS]
    counts = [len(row) - (kind == "causal") for row in ROWS]  # a causal model has no target for a first token
    losses = [model(input_ids=row[None], labels=row[None]).loss for row in ROWS]
    loss = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
    return logits, loss.detach(), gradients_of(model, loss)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: None if g is None else g.clone() for name, g in gradients(model).items()}


def check_rows(model, call, layout, want):
    """Raises AssertionError where a call on rows differs from the rows alone."""
    tokens = LAYOUTS[layout](ROWS)
    logits, loss, grads = want
    with torch.no_grad():
        found = call(input_ids=tokens).logits.to_tensors()
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-3)
    found = call(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(found.detach(), loss, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients_of(model, found), grads, atol=1e-4, rtol=1e-3)


def outcome(kind, name):
    """The reason that rows are refused: empty for a model that runs, and None where dense rows fail, too.

    A model that gives other numbers raises AssertionError.
    """
    try:
        model = build_text_model(kind, name)
        want = of_rows(model, kind)
    except Exception:  # noqa: BLE001 - as above
        return None
    for layout in LAYOUTS:
        try:
            check_rows(model, model, layout, want)
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            said = str(error).partition("\n")[0]
            return next((why for word, why in REASONS.items() if word in said), f"`{said[:100]}`")
    return ""


def main():
    words, found = sys.argv[1:], defaultdict(list)
    for kind, names in KINDS.items():
        for name in names:
            if not words or any(word in name for word in words):
                found[kind, result := outcome(kind, name)].append(name)
                print(f"{kind} {name}:", "runs" if result == "" else result)
    if words:
        return
    lines = [BEGIN, ""]
    for kind in KINDS:
        runs = found[kind, ""]
        lines += [f"**{kind.capitalize()} language models ({len(runs)}):** {', '.join(runs)}.", ""]
    lines += ["| refused: what the model does | models |", "|---|---|"]
    for why in sorted({why for _, why in found if why}):
        lines.append(f"| {why} | {', '.join(dict.fromkeys(n for kind in KINDS for n in found[kind, why]))} |")
    text = wrap("\n".join([*lines, "", END])).rstrip("\n")
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: text, PAGE.read_text(), flags=re.DOTALL))


def running():
    """The models that the page lists: pairs of a kind and a name."""
    found = re.findall(r"\*\*(\w+) language\s+models \(\d+\):\*\*\s+([^*|]+?)\.\n", PAGE.read_text())
    return [(kind.lower(), name) for kind, names in found for name in re.split(r",\s+", names)]


if __name__ == "__main__":
    main()
