"""Times `model.generate` for one prompt: as a ragged tensor of one row, beside a dense tensor of one row.

    python -m bench.one_prompt              # eager
    python -m bench.one_prompt --compile    # by desugar.compile with Inductor

A Llama of two layers, 256 wide, with random weights. The two calls take turns, and run the same programs. Prints the
median time of each, and the median of their ratios. Times are those of the processor, so other processes count little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers

import desugar
from subclasses.ragged import JaggedTensor

CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 680,
    "num_hidden_layers": 2,
}
CONFIG |= {"num_attention_heads": 4, "pad_token_id": 0}
PROMPT, NEW = 64, 32  # tokens


def timed(generate: Callable[[], Any]) -> float:
    """Returns the seconds of a call."""
    start = time.process_time()
    generate()
    return time.process_time() - start


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--pairs", type=int, default=40, help="how often both are timed; default: 40")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    if options.compile:
        model = desugar.compile(model, dynamic=True)
    prompt = torch.randint(1, CONFIG["vocab_size"], (PROMPT,))
    forms = [prompt[None], JaggedTensor.from_tensors([prompt])]
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    dense, ragged = ((lambda form=form: model.generate(form, **how)) for form in forms)
    for _ in range(3):
        assert torch.equal(dense()[0], ragged().to_tensors()[0])
    pairs = [
        (timed(dense), timed(ragged)) if turn % 2 else (timed(ragged), timed(dense))[::-1]
        for turn in range(options.pairs)
    ]
    ratio = median(other / one for one, other in pairs)
    one, other = (1e3 * median(times) for times in zip(*pairs, strict=True))
    programs = f", {len(model.programs)} programs" if options.compile else ""
    print(f"dense {one:.1f} ms, ragged {other:.1f} ms, ratio {ratio:.2f}{programs}")


if __name__ == "__main__":
    main()
