"""Which models of transformers take ragged rows; writes the lists of docs/hugging-face.md.

python -m tests.models.text_models          # some ten minutes
python -m tests.models.text_models bert     # prints the outcomes of the models with such a name

A model runs if each row has the same logits as that row alone, in both layouts. The gradients of a batch's loss must
equal the gradients of its rows' losses. `encoder_models` has the encoders of speech and images.
"""

import functools
import re
import sys
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.auto import modeling_auto

from docs.wrap import wrap
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.ragged.hugging_face import RaggedCache
from tests.models.encoder_models import CASES, Encoder
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
TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "speech": "Speech encoders",
    "vision": "Vision transformers",
    "cached": "Causal language models that generate with `RaggedCache`",
}
ROWS = [ids(1, length, seed=length)[0] for length in (7, 3, 5)]
TEXTS = {  # a causal model has no target for a first token
    kind: Encoder("", {}, ROWS, options={"labels": ROWS}, weights=weights)
    for kind, weights in {"causal": (6 / 12, 2 / 12, 4 / 12), "masked": (7 / 15, 3 / 15, 5 / 15)}.items()
}
LARGEST = 20_000_000  # parameters; a model that reads other names for its sizes is larger
EXPERTS = dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4) | {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GROUPED = {"num_key_value_heads": 2}
SIZES = [GROUPED | {"head_dim": 8}, GROUPED, {}, GROUPED | {"head_dim": 8} | EXPERTS]
# Code in a model that rows refuse, by a word of the error.
REASONS = {
    "to be of length": "one length for all rows, which a row alone does not have",
    "should be greater than 0": "positions by the size of one image, beside the embeddings",
    "does not broadcast": "positions by the size of one image, beside the embeddings",
    "do not join": "positions by the size of one image, beside the embeddings",
    "expected a dense attn_mask": "a bias of attention with rows",
    "the batch dimension": "a dimension before the batch",
    "in pairs of ints": "padding that depends on the longest row",
    "two ragged dimensions": "attention written in the layer, which `attn_implementation` does not replace",
    "cannot view": "a view that merges rows with heads or features",
    "copy_": "a state of one size for all rows",
    "__setitem__": "a write of rows into a dense tensor",
    "gather": "a dense index, one place for each row",
    "scatter": "a scatter into rows",
    "pad": "an entry before the first, or behind the last one, of a short row",
    "_fft": "a Fourier transform along the rows",
    "_unsafe_view": "windows over merged rows",
    "each row has the same length": "a sum of rows with other lengths",
    "as many dimensions": "a sum with a tensor that is ragged along another dimension",
    "merged dimensions": "a transpose of merged rows",
    "repeat": "a repetition of merged rows",
}


def build_text_model(kind, name):
    """A tiny model without dropout, by the first sizes that it takes."""
    model_name = KINDS[kind][name]
    known = (ZOO | MIXTURES).get(name)
    if known is not None and type(model := known.build()).__name__ == model_name:
        return model
    cls = getattr(transformers, model_name)
    for sizes in SIZES:
        with suppress(Exception):  # a configuration may raise anything
            with torch.device("meta"):
                size = cls._from_config(cls.config_class(**TINY | NO_DROPOUT | sizes)).num_parameters()
            if size < LARGEST:
                return build(model_name, TINY | NO_DROPOUT | sizes)
    raise LookupError(f"{name}: no small model")


def model_of(kind, name):
    """A model, and how it is called."""
    case = CASES[kind][name] if kind in CASES else TEXTS[kind]
    model = (
        build(case.model, case.sizes).get_submodule(case.part) if case.model else build_text_model(kind, name)
    )
    return model, case


def results(out):
    """Each tensor of an output as the results of the rows, and the loss, or the sum of the rows' mean squares."""
    found = dict(out) if isinstance(out, dict) else {"": out}
    parts = [
        t.to_tensors() if isinstance(t, JaggedTensor | PaddedTensor) else list(t)
        for name, t in found.items()
        if isinstance(t, torch.Tensor) and t.dim() and name != "loss"
    ]
    squares = sum(row.square().mean() for part in parts for row in part if row.is_floating_point())
    return parts, found.get("loss", squares)


def alone(call, case):
    """The results of each row."""
    return [
        call(row[None], **{k: v[i][None] if isinstance(v, list) else v for k, v in case.options.items()})
        for i, row in enumerate(case.rows)
    ]


def joined(values, join):
    """The arguments of each row, as rows; positions ``[T, D]`` are the same for all heads."""
    if isinstance(values[0], tuple):
        return tuple(joined(each, join) for each in zip(*values, strict=True))
    return join([t[0] for t in values]) if values[0].dim() == 3 else join(values).unsqueeze(1)


def together(model, call, case, layout):
    """The results of all rows at once; a model that embeds images gets an image without pixels besides."""
    join = LAYOUTS[layout]
    options = {
        k: join(v) if k == "labels" else torch.stack(v) if isinstance(v, list) else v
        for k, v in case.options.items()
    }
    if not case.embeds:
        x = join([row.movedim(case.dim, 0) for row in case.rows])
        return call(x.transpose(1, 2) if case.dim else x, **options)
    made = {model.get_submodule(name): [] for name in case.embeds}
    with register_module_forward_hook(lambda module, _, out: made.get(module, []).append(out)):
        alone(model, case)
    with ExitStack() as stack:
        for module, values in made.items():
            given = functools.partial(lambda rows, *_, **__: rows, joined(values, join))
            stack.enter_context(mock.patch.object(module, "forward", given))
        return call(case.rows[0][None, :, :0, :0], **options)


def of_rows(model, case):
    """The results of each row alone, the loss of all rows, and its gradients."""
    found = [results(out) for out in alone(model, case)]
    parts = [[row for (row,) in part] for part in zip(*(parts for parts, _ in found), strict=True)]
    loss = sum(loss * weight for (_, loss), weight in zip(found, case.weights, strict=True))
    return case, parts, loss, gradients_of(model, loss)


def gradients_of(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def check_rows(model, call, layout, want):
    """Raises AssertionError where a call on rows differs from the rows alone, or one row changes another."""
    case, *expected = want
    parts, loss = results(together(model, call, case, layout))
    torch.testing.assert_close([parts, loss, gradients_of(model, loss)], expected, atol=1e-4, rtol=1e-3)
    first, *rest = case.rows
    spoilt = case._replace(rows=[first * torch.nan if first.is_floating_point() else first.flip(0), *rest])
    with torch.no_grad():
        parts, _ = results(together(model, call, spoilt, layout))
    torch.testing.assert_close([p[1:] for p in parts], [p[1:] for p in expected[0]], atol=1e-4, rtol=1e-3)


def check_generation(name):
    """Raises AssertionError where rows of a `RaggedCache` differ from each prompt alone."""
    model = build_text_model("causal", name)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = [model.generate(row[None], **options)[0] for row in ROWS]
    cache = RaggedCache(model.config)
    got = model.generate(JaggedTensor.from_tensors(ROWS), past_key_values=cache, **options)
    torch.testing.assert_close(got.to_tensors(), want)
    assert cache.row_lengths.tolist() == [len(row) - 1 for row in want]


def outcome(kind, name):
    """The reason that rows are refused: empty for a model that runs, and None where dense rows fail, too.

    A model that gives other numbers raises AssertionError.
    """
    try:
        model, case = model_of(kind, name)
        want = of_rows(model, case)
    except Exception as error:  # noqa: BLE001 - as above
        return next((why for word, why in REASONS.items() if kind in CASES and word in str(error)), None)
    for layout in LAYOUTS:
        try:
            check_rows(model, model, layout, want)
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            said = str(error).partition("\n")[0]
            return next((why for word, why in REASONS.items() if word in said), f"`{said[:100]}`")
    return ""


def main():
    words, found = sys.argv[1:], defaultdict(list)
    for kind, name in [(kind, name) for kind, names in (KINDS | CASES).items() for name in names]:
        if not words or any(word in name for word in words):
            found[kind, result := outcome(kind, name)].append(name)
            print(f"{kind} {name}:", "runs" if result == "" else result)
    if words:
        return
    for name in found["causal", ""]:
        with suppress(NotImplementedError):
            check_generation(name)
            found["cached", ""].append(name)
    lists = [
        f"**{title} ({len(found[kind, ''])}):** {', '.join(f'`{name}`' for name in found[kind, ''])}.\n"
        for kind, title in TITLES.items()
    ]
    refused = [
        f"| {why} | {', '.join(dict.fromkeys(name for kind in TITLES for name in found[kind, why]))} |"
        for why in sorted({why for _, why in found if why})
    ]
    table = ["| refused: what the model does | models |", "|---|---|", *refused, ""]
    text = wrap("\n".join([BEGIN, "", *lists, *table, END])).rstrip("\n")
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: text, PAGE.read_text(), flags=re.DOTALL))


def running(*kinds):
    """The models of these kinds that the page lists: pairs of a kind and a name."""
    found = re.findall(r"\*\*([^*]+?) \(\d+\):\*\*\s+([^*|]+?)\.\n", PAGE.read_text())
    names = {" ".join(title.split()): re.findall(r"`(.+?)`", names) for title, names in found}
    return [(kind, name) for kind in kinds for name in names.get(TITLES[kind], [])]


if __name__ == "__main__":
    main()
