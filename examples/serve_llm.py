"""Serve a small Llama with int8 weights: requests come and go, and three programs answer them all.

A server of language models keeps the keys and values of every request that it is answering. Here they lie in one
table with a *slot* for each request, `KVCache`, a tensor subclass declared in this file. A *decode* step gives every
busy slot its next token, however long each slot's text is: the lengths are a tensor, so they are data, and one
program serves all steps. When an answer is complete its slot is free, and the next request moves in while the other
slots go on (*continuous batching*). A *prefill* reads a prompt into a slot, as a `PaddedTensor`: prompts of any
length have one program for each bucket. Both functions write to the table in place. The weights are floats or
`Int8Tensor`s. The code of the model mentions none of the three classes.

The table compares three ways. *alone*, the plain way, is eager PyTorch: one request at a time, with a cache of plain
tensors that grows by `cat`. *in slots* is the server of this file in eager mode, *compiled* the same server with
`desugar.compile`. Every request has to get the answer that it gets alone with the same weights, or the script fails.
Two logits that rounding may swap count as a tie, and tokens after a tie are not compared: quantized activations make
one every hundred tokens or so (`--weight-only` makes none). The weights are random, so the text means nothing; a
trained model has the same speed.

    python examples/serve_llm.py --width 512 --layers 4
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import desugar
from _llama import GROUP, HEAD_DIM, Llama, Request, answer_alone, attention, make_requests, time_answers
from _options import Quick, Seed, fail
from quantize_ragged_lm import CONFIGS, quantized
from subclasses import TensorSubclass, inner
from subclasses.ragged import PaddedTensor

BUCKETS = (32, 64)  # widths of the tables that prompts are padded to
PROGRAMS = len(BUCKETS) + 1  # a prefill for each bucket, and one decode step
LONGEST_ANSWER = 48
CAPACITY = BUCKETS[-1] + LONGEST_ANSWER
RUNS = 3

TIES = {"float32": 1e-4, "int8 weights": 1e-4, "int8 weights, activations": 0.02}
"""Margins that rounding may overturn. Logits lie about 0.1 apart; quantized activations amplify a rounding error."""

# ---------------------------------------------------------------------------------------------------------
# The cache, and the two functions that are compiled
# ---------------------------------------------------------------------------------------------------------


class KVCache(TensorSubclass):
    """Keys and values of every layer, and how many each slot holds; a free slot holds none."""

    key: Tensor = inner(shape="layers slots capacity heads dim")
    value: Tensor = inner(shape="layers slots capacity heads dim")
    lengths: Tensor = inner(dtype=torch.int64, shape="slots")

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts `k` and `v` `[B, T, heads, dim]` at positions `[B, T]` of slots `[B, 1]`."""
        index = torch.full_like(slots, layer), slots, positions
        self.key[index] = k
        self.value[index] = v

    def attend_next(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends one entry to each slot; attends to all that the slot holds then."""
        slots, positions = (torch.arange(n) for n in self.key.shape[1:3])
        last = self.lengths[:, None]
        self.write(layer, slots[:, None], last, k, v)
        mask = (positions <= last)[:, None, None]
        return attention(q, self.key[layer], self.value[layer], attn_mask=mask)


def prefill(model: Llama, cache: KVCache, slot: Tensor, prompt: PaddedTensor) -> Tensor:
    """Reads one prompt `[1, T]` into a slot `[1]`; returns the first token of the answer, `[1]`."""
    positions = torch.arange(prompt.shape[1])

    def attend(layer: int, q: PaddedTensor, k: PaddedTensor, v: PaddedTensor) -> Tensor:
        cache.write(layer, slot[:, None], positions[None], k.to_dense(fill=0), v.to_dense(fill=0))
        return attention(q, k, v, is_causal=True)

    logits = model(prompt, positions, attend)
    cache.lengths[slot] = prompt.row_lengths()
    return logits.argmax(-1)


def decode(model: Llama, cache: KVCache, tokens: Tensor) -> Tensor:
    """The next token of every slot from its newest one, `[slots]`; the token of a free slot means nothing."""
    logits = model(tokens[:, None], cache.lengths[:, None], cache.attend_next)
    cache.lengths.add_(cache.lengths > 0)
    return logits.argmax(-1)


# ---------------------------------------------------------------------------------------------------------
# Continuous batching
# ---------------------------------------------------------------------------------------------------------


class Server:
    """A model, a cache, and the requests that hold its slots."""

    def __init__(self, model: Llama, slots: int, compile_one: Callable[..., Any]):
        heads = model.embedding.embedding_dim // (HEAD_DIM * GROUP)
        shape = (len(model.layers), slots, CAPACITY, heads, HEAD_DIM)
        lengths, self.tokens = (torch.zeros(slots, dtype=torch.int64) for _ in range(2))
        self.model, self.cache = model, KVCache(torch.zeros(shape), torch.zeros(shape), lengths)
        self.free, self.busy = list(range(slots)), dict[int, Request]()
        self.prefill, self.decode = compile_one(prefill), compile_one(decode)

    def admit(self, request: Request) -> None:
        slot = self.free.pop()
        self.busy[slot] = request
        prompt = PaddedTensor.from_tensors([request.prompt], buckets=BUCKETS)
        self.tokens[slot] = self.prefill(self.model, self.cache, torch.tensor([slot]), prompt)[0]
        self.give(slot, int(self.tokens[slot]))

    def step(self) -> None:
        self.tokens = self.decode(self.model, self.cache, self.tokens)
        for slot, token in enumerate(self.tokens.tolist()):
            if slot in self.busy:
                self.give(slot, token)

    def give(self, slot: int, token: int) -> None:
        """Hands a token to the request that holds a slot, which leaves with its last one."""
        request = self.busy[slot]
        request.answer.append(token)
        if len(request.answer) == request.size:
            self.cache.lengths[slot] = 0
            self.free.append(slot)
            del self.busy[slot]

    def serve(self, requests: list[Request]) -> None:
        """Answers all requests; `arrives` counts the steps from here."""
        waiting, step = deque(requests), 0
        while waiting or self.busy:
            while waiting and self.free and waiting[0].arrives <= step:
                self.admit(waiting.popleft())
            if self.busy:
                self.step()
            step += 1

    def count_programs(self) -> int:
        return len(self.prefill.programs) + len(self.decode.programs)


# ---------------------------------------------------------------------------------------------------------
# Measured, and compared with each request alone
# ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare(model: Llama, kinds: list[str], requests: list[Request], slots: int, backend: str) -> None:
    """Answers the requests in three ways with each of the `kinds` of weights; prints a table.

    Raises:
        typer.Exit: an answer differs from the answer to its request alone, or there are more than `PROGRAMS` programs.
    """
    table = Table(title=f"{len(requests)} requests: one at a time, in {slots} slots, and in slots compiled")
    for heading in ("weights", "way", "tokens / s", "first run, s", "programs", "as alone"):
        is_name = heading in ("weights", "way")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    tokens, right = sum(request.size for request in requests), True
    for weights in kinds:
        torch.compiler.reset()  # programs belong to the code of a function, which all servers share
        small = quantized(model, CONFIGS[weights])
        compiled = Server(small, slots, partial(desugar.compile, backend=backend, dynamic=False))
        ways = {
            "alone": partial(answer_alone, small),
            "in slots": Server(small, slots, lambda function: function).serve,
            "compiled": compiled.serve,
        }
        results = {way: time_answers(answer, requests, RUNS) for way, answer in ways.items()}
        alone, _ = results["alone"]
        for way, (answered, seconds) in results.items():
            margins = [a.margin_at_difference(b) for a, b in zip(alone, answered, strict=True)]
            programs = compiled.count_programs() if way == "compiled" else 0
            right &= programs <= PROGRAMS and all(m is None or m < TIES[weights] for m in margins)
            rate, equal = tokens / min(seconds[1:]), f"{margins.count(None)} of {len(margins)}"
            table.add_row(weights, way, f"{rate:,.0f}", f"{seconds[0]:.1f}", str(programs), equal)
        table.add_section()
    widths = " and ".join(map(str, BUCKETS))
    table.caption = f"Programs: for prompts in tables of {widths} places, for decode steps"
    Console().print(table)
    if not right:
        fail(
            "An answer differs from the answer to its request alone, or there are too many programs: see the table."
        )


def main(
    width: Annotated[int, typer.Option(min=64, help="Of the model; a multiple of 64.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 2,
    slots: Annotated[
        int, typer.Option(min=1, max=1000, help="Requests answered at a time, of three times as many.")
    ] = 8,
    weight_only: Annotated[
        bool, typer.Option(help="Leave activations as floats beside int8 weights.")
    ] = False,
    quick: Quick = False,
    seed: Seed = 0,
) -> None:
    """Serve one model with float and int8 weights; fail if an answer differs from the answer to its request alone."""
    if width % (GROUP * HEAD_DIM):
        raise typer.BadParameter(f"{width} is not a multiple of {GROUP * HEAD_DIM}.", param_hint="'--width'")
    torch.manual_seed(seed)
    model = Llama(64 if quick else width, layers, positions=CAPACITY)
    requests = make_requests(3 * slots, BUCKETS[-1], LONGEST_ANSWER, seed)
    kinds = ["float32", "int8 weights" if weight_only else "int8 weights, activations"]
    compare(model, kinds, requests, slots, "eager" if quick else "inductor")


if __name__ == "__main__":
    typer.run(main)
