"""Decoding with buckets: how many programs it takes, that no step reads a length, and what it generates."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch._dynamo import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend

import desugar
from subclasses.ragged import PaddedTensor
from tests.doors import by_desugar
from tests.subclasses.ragged.serving import Model, NoReading, decode, decode_row, decode_step

PROMPTS = [3, 1, 2]
LONGEST, BUCKET = 64, 16  # tables of 16, 32, 48 and 64 places


@pytest.fixture
def model():
    return Model().double().eval()


def prompts_of(device="cpu"):
    torch.manual_seed(1)
    return [torch.randint(20, (n,), device=device) for n in PROMPTS]


def run(step, model, longest=LONGEST):
    """Decodes, and compares with decoding row by row."""
    *_, tokens = decode(step, prompts_of(), longest, BUCKET)
    expected = [decode_row(model, prompt, longest - max(PROMPTS)) for prompt in prompts_of()]
    torch.testing.assert_close(tokens.to_tensors(), expected)


# ---- programs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "programs"), [(False, {4}), (None, {1, 2})])
@torch.no_grad()
def test_64_lengths_in_buckets_of_16_are_4_programs(model, dynamic, programs):
    """With symbolic widths they are fewer."""
    compiled = by_desugar(functools.partial(decode_step, model), dynamic=dynamic)
    run(compiled, model)
    assert len(compiled.programs) in programs
    for program in compiled.programs:
        names = {str(node.target) for node in program.forward.graph.nodes}
        assert not [n for n in names if any(n.startswith(f"aten.{word}.") for word in NoReading.REFUSED)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["desugar", "aot_eager"])
@torch.no_grad()
def test_64_lengths_are_4_programs_behind_dynamo(model, backend):
    options = {"options": {"backend": "eager"}} if backend == "desugar" else {}
    counter = CompileCounterWithBackend(functools.partial(lookup_backend(backend), **options))
    run(torch.compile(lambda t: decode_step(model, t), fullgraph=True, dynamic=False, backend=counter), model)
    assert counter.frame_count == 4


@torch.no_grad()
def test_a_padded_batch_takes_no_more_programs(model):
    """Batches of 1 to 8 requests in a table of 8 rows: one program."""
    compiled = by_desugar(functools.partial(decode_step, model), dynamic=False)
    for count in range(1, 9):
        rows = [torch.randint(20, (n + 1,)) for n in range(count)]
        tokens = PaddedTensor.from_tensors(rows, multiple=BUCKET, batch_multiple=8)
        got = compiled(tokens).to_tensors()
        torch.testing.assert_close(got, [decode_row(model, row, 1) for row in rows])
    assert len(compiled.programs) == 1


# ---- nothing is read -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_no_step_reads_a_length(model, compiled):
    step = functools.partial(decode_step, model)
    step = by_desugar(step, dynamic=False) if compiled else step
    run(step, model, 20)  # what is compiled is compiled now
    steps = decode(step, prompts_of(), 20, BUCKET)
    with NoReading():
        *_, tokens = steps
    assert tokens.shape == (3, 32)


@torch.no_grad()
def test_no_step_reads_what_it_cuts_picks_or_writes():
    x = PaddedTensor.from_tensors([torch.randn(n, 4) for n in (3, 5, 2)], multiple=8, batch_multiple=4)
    plain = PaddedTensor(x.padded[:3], x.lengths[:3])
    index = PaddedTensor.from_tensors([torch.ones(1, 4, dtype=torch.int64)] * 3)
    with NoReading():
        for y in (x, x.flatten(0, 1).unflatten(0, (4, 8)), plain):
            y[:, -1], y[:, -2:], y[:, 1::2], y[1:3], y.chunk(2, 1), y[y > 0], y.topk(2, 1), y[:, [0, -1]]
            y.mean(1), y.amax(1), y.var(1), y.softmax(1), y.cumsum(1), y.sort(1)
            z = y.clone()
            z[:, 0], z[:, 1:], z[z > 0] = 1.0, 2.0, 3.0
        plain.gather(1, index)
        x.append(torch.zeros(4, 4)), x.to_padded(multiple=16), x.flatten(0, 1).mean(), x.mean(1).mean(0)


# ---- CUDA ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_no_step_synchronises(model, compiled):
    model = model.float().cuda()
    step = functools.partial(decode_step, model)
    step = desugar.compile(step, dynamic=False) if compiled else step
    *_, _ = decode(step, prompts_of("cuda"), 20, BUCKET)  # what is compiled is compiled now
    tokens = PaddedTensor.from_tensors(prompts_of("cuda"), multiple=BUCKET)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in range(max(PROMPTS), 20):
            tokens = step(tokens.to_padded(multiple=BUCKET, at_least=length + 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(row) for row in tokens.to_tensors()] == [20, 18, 19]


@pytest.mark.gpu
@torch.no_grad()
def test_64_lengths_record_4_graphs(model):
    """A bucket's first step compiles, its second records; every other replays."""
    from torch._inductor.cudagraph_trees import get_container

    model = model.float().cuda()
    step = desugar.compile(functools.partial(decode_step, model), dynamic=False, mode="reduce-overhead")

    def marked(tokens):
        torch.compiler.cudagraph_mark_step_begin()
        new = step(tokens)  # in memory that the next step writes to; a clone shares the lengths
        return new.with_lengths(new.padded.clone(), new.lengths.clone())

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cudagraph")  # that they are skipped, for one
        for _ in range(3):
            *_, tokens = decode(marked, prompts_of("cuda"), LONGEST, BUCKET)
    assert len(step.programs) == 4
    manager = get_container(torch.cuda.current_device()).get_tree_manager()
    assert manager.new_graph_id().id == 4
    expected = [decode_row(model, prompt, LONGEST - max(PROMPTS)) for prompt in prompts_of("cuda")]
    torch.testing.assert_close(tokens.to_tensors(), expected)
