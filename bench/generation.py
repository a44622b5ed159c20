"""Times `model.generate` for ragged prompts.

    python -m bench.generation              # eager
    python -m bench.generation --compile    # by desugar.compile with Inductor

Two Llamas with random weights, on one thread. The ways of a case take turns, and generate the same tokens:

- ``one prompt``, 2 layers of width 256: a dense tensor of one row; a ragged tensor of one row.
- ``16 prompts`` of 5 to 800 tokens, 4 layers of width 1024: a table with a mask; ragged prompts with a `RaggedCache`.

Prints the median time of each way, and the median of their ratios. Times are processor times, which other processes
affect little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

import desugar
from subclasses.ragged import JaggedTensor
from subclasses.ragged.hugging_face import RaggedCache

VOCABULARY = 4096
SMALL = {"hidden_size": 256, "intermediate_size": 680, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
LENGTHS = (800, 20, 30, 100, 50, 400, 10, 10, 60, 70, 90, 300, 5, 8, 20, 44)
NEW = 32  # tokens


def timed(generate: Callable[[], Any]) -> float:
    """Returns the seconds of a call."""
    start = time.process_time()
    generate()
    return time.process_time() - start


def compared(sizes: dict[str, int], lengths: tuple[int, ...], is_compiled: bool, pairs: int) -> str:
    """Returns the seconds of a call with a dense tensor, of one with ragged prompts, and their ratio, as a line."""
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    call = desugar.compile(model, dynamic=True) if is_compiled else model
    rows = [torch.randint(1, VOCABULARY, (n,)) for n in lengths]
    table, mask = (
        pad_sequence(x, batch_first=True, padding_side="left")
        for x in (rows, [torch.ones_like(r) for r in rows])
    )
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}

    def dense() -> Any:
        return call.generate(table, attention_mask=mask, **options)

    def ragged() -> Any:
        cache = {"past_key_values": RaggedCache(config)} if len(rows) > 1 else {}
        return call.generate(JaggedTensor.from_tensors(rows), **options, **cache)

    for _ in range(2):
        for one, other in zip(dense(), ragged().to_tensors(), strict=True):
            assert torch.equal(one[-NEW:], other[-NEW:])
    times = [
        (timed(dense), timed(ragged)) if turn % 2 else (timed(ragged), timed(dense))[::-1]
        for turn in range(pairs)
    ]
    ratio = median(b / a for a, b in times)
    first, second = (median(column) for column in zip(*times, strict=True))
    return f"dense {first:.3f} s, ragged {second:.3f} s, ratio {ratio:.2f}"


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="compile the models")
    parser.add_argument("--pairs", type=int, default=40, help="how often one prompt is timed; default: 40")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("one prompt:", compared(SMALL, (64,), options.compile, options.pairs))
    print("16 prompts:", compared(LARGE, LENGTHS, options.compile, 1 + options.pairs // 8))


if __name__ == "__main__":
    main()
