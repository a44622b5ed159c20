"""A small decoder in training and in decoding: how many programs it takes, that no step reads a length, and values."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import desugar
from subclasses.ragged import JaggedTensor, PaddedTensor
from tests.doors import DOORS, by_desugar

# ---- nothing is read -------------------------------------------------------------------------------------------


class NoReading(TorchDispatchMode):
    """Refuses every op that hands data to the host."""

    REFUSED = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Any other op runs."""
        if func.overloadpacket.__name__.split(".")[-1] in self.REFUSED:
            raise AssertionError(f"{func} reads data")
        return func(*args, **(kwargs or {}))


# ---- a decoder -------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A small decoder, as one would write it for a dense batch."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(20, 8), torch.nn.Embedding(64, 8)
        self.norm, self.qkv, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 20)

    def forward(self, tokens):
        """Logits for each token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x)


def decode_step(model, tokens):
    """Every row longer by its most likely next token."""
    return tokens.append(model(tokens)[:, -1].argmax(-1))


def decode(step, prompts, longest, bucket):
    """Steps until the longest row has this many tokens; the host counts, since it may not ask."""
    tokens = PaddedTensor.from_tensors(prompts, multiple=bucket)
    for length in range(max(map(len, prompts)), longest):
        tokens = step(tokens.to_padded(multiple=bucket, at_least=length + 1))
        yield tokens


def decode_row(model, prompt, steps):
    """The same for one plain row."""
    for _ in range(steps):
        prompt = torch.cat([prompt, model(prompt[None])[0, -1:].argmax(-1)])
    return prompt


# ==== training ======================================================================================================

BATCHES = [[3, 7, 5], [2, 9], [4, 4, 4, 4], [11, 2, 0, 5, 6], [19, 18]]
TABLES = [[5, 3, 9], [16, 1, 2], [0, 4, 4]]  # as many rows of one bucket


def loss_of(model, tokens, targets, merged):
    operands = model(tokens), targets
    return F.cross_entropy(*(t.flatten(0, 1) if merged else t.mT if t.dim() == 3 else t for t in operands))


def loss_of_rows(model, rows):
    losses = [F.cross_entropy(model(row[None])[0], (row + 1) % 9, reduction="none") for row in rows]
    return torch.cat(losses).mean()


def batch_of(layout, rows):
    """Rows of tokens and of targets; the padding holds numbers that are not tokens."""
    if layout == "jagged":
        tokens = JaggedTensor.from_tensors(rows)
        return tokens, tokens.with_values((tokens.values + 1) % 9)
    x = PaddedTensor.from_tensors(rows, multiple=16)
    dense = x.to_dense(fill=10**6)
    return x.with_padded(dense), x.with_padded(torch.where(dense < 9, (dense + 1) % 9, dense))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("door", ["eager", "stock", "desugar"])
@pytest.mark.parametrize(("layout", "batches"), [("jagged", BATCHES), ("padded", TABLES)])
def test_one_program_serves_all_lengths(layout, batches, door):
    model, counter = Model().double(), CompileCounterWithBackend("aot_eager")
    step = functools.partial(loss_of, model, merged=layout == "jagged")
    options = {"dynamic": None if layout == "jagged" else False}
    doors = DOORS | {"stock": functools.partial(torch.compile, fullgraph=True, backend=counter)}
    compiled = doors[door](step, **options)
    for lengths in batches:
        rows = [torch.randint(0, 9, (n,)) for n in lengths]
        losses = compiled(*batch_of(layout, rows)), loss_of_rows(model, rows)
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, list(model.parameters())) for loss in losses))
    assert door == "eager" or (counter.frame_count if door == "stock" else len(compiled.programs)) == 1


def test_a_training_step_of_a_table_reads_nothing():
    model, rows = Model().double(), [torch.randint(0, 9, (n,)) for n in TABLES[0]]
    batch = batch_of("padded", rows)
    with NoReading(), pytest.raises(AssertionError, match="reads data"):
        torch.ones(2)[0].item()
    with NoReading():
        loss = loss_of(model, *batch, merged=False)
        loss.backward()
    torch.testing.assert_close(loss, loss_of_rows(model, rows))


# ==== decoding ======================================================================================================

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
    run(step, model, 20)  # compiles every program first
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
    *_, _ = decode(step, prompts_of("cuda"), 20, BUCKET)  # compiles every program first
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
