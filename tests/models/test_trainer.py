"""`transformers.Trainer` and accelerate with ragged batches: the same numbers as with padding."""

import copy
import os
import random
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import desugar
from subclasses.ragged.hugging_face import RaggedCollator

pytest.importorskip("transformers", reason="needs the extra `models`")
pytest.importorskip("accelerate", reason="Trainer needs it")

import accelerate
import tokenizers
import transformers

from tests.models.test_ragged_rows import MODELS
from tests.models.zoo import TINY, VOCABULARY, ZOO, build
from tests.subclasses.ragged.ranks import in_processes, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft
    # The warning of `torch.utils.checkpoint` if the inputs of a layer need no gradient.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]

LAYOUTS = {
    "jagged": RaggedCollator(),
    "padded": RaggedCollator(layout="padded"),
    "buckets": RaggedCollator(layout="padded", buckets="powers"),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
WIDE = TINY | {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _fresh():
    """No dtype of an earlier test's autocast."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def llama():
    return build("LlamaForCausalLM", WIDE)


def with_lora(weights):
    """A model with adapters; the test is skipped where peft is absent."""
    return pytest.importorskip("tests.models.test_adapters").with_adapters("llama", weights)


def examples(count, seed):
    """Rows of 2 to 30 tokens; each third one has labels for its second half alone."""
    draw = random.Random(seed)
    rows = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(2, 31))] for _ in range(count)]
    prompts = [len(row) // 2 if number % 3 == 0 else 0 for number, row in enumerate(rows)]
    return [
        {"input_ids": row, "labels": [-100] * prompt + row[prompt:]}
        for row, prompt in zip(rows, prompts, strict=True)
    ]


TRAIN, EVALUATE = examples(34, seed=0), examples(8, seed=1)


def with_padding(rows):
    """The batch of an ordinary collator."""
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in given], batch_first=True, padding_value=fill)
        for given in [[row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]]
        for name, fill in {"input_ids": 0, "labels": -100, "attention_mask": 0, "token_type_ids": 0}.items()
        if name in given[0]
    }


def without_times(logs):
    return {key: x for key, x in logs.items() if not key.endswith(("runtime", "per_second", "time", "flos"))}


def metrics_of(prediction):
    """The metrics that a script computes from dense arrays; the padding has the label -100."""
    found, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return ({} if prediction.inputs is None else {"tokens": (prediction.inputs > 0).sum()}) | {
        "accuracy": (found == labels)[labels != -100].mean(),
        "labels": (labels != -100).sum(),
        "logit": prediction.predictions[:, :-1][labels != -100].mean(),
    }


def sft_trainer(model, arguments, *, train_dataset, eval_dataset, **options):
    """The SFTTrainer of trl with the loss of Trainer: its own loss computes chunks of tokens that cross rows."""
    trl, datasets = map(pytest.importorskip, ("trl", "datasets"))
    tables = {
        name: datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint=name)
        for name, rows in {"train_dataset": train_dataset, "eval_dataset": eval_dataset}.items()
    }
    return type(
        "RaggedSFTTrainer",
        (trl.SFTTrainer,),
        {name: vars(transformers.Trainer)[name] for name in ("compute_loss", "prediction_step")},
    )(
        *(model, arguments),
        **tables,
        **options,
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"end": 0}, unk_token="end")),
            **dict.fromkeys(["pad_token", "eos_token"], "end"),
        ),
    )


def make_trainer(folder, collator, make=llama, trainer=transformers.Trainer, **options):
    options = {
        "output_dir": str(folder),
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    } | options
    return trainer(
        make(),
        transformers.TrainingArguments(**options),
        train_dataset=TRAIN,
        eval_dataset=EVALUATE,
        data_collator=collator,
        compute_metrics=metrics_of,
    )


def assert_same_logs(got, want, **tolerance):
    """The losses, gradient norms and metrics of each step."""
    assert [sorted(each) for each in got] == [sorted(each) for each in want]
    assert sum("grad_norm" in each for each in want) >= 3 and any("eval_accuracy" in each for each in want)
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one == pytest.approx(other, **({"rel": 1e-4, "abs": 1e-5} | tolerance)), step


OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "smoothing": {"label_smoothing_factor": 0.1},
    "smoothing and accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "clipping and decay": {"max_grad_norm": 0.3, "weight_decay": 0.1},
    "checkpointing": {"activation_checkpointing": True},
    "workers": {"dataloader_num_workers": 1},
    "evaluation in parts": {"eval_accumulation_steps": 1},
    "all columns": {"remove_unused_columns": False},
    "bfloat16": {"bf16": True},
    "trl": {"trainer": sft_trainer},
    "LoRA": {"make": partial(with_lora, "plain")},
    "LoRA beside int8 weights": {"make": partial(with_lora, "int8 before")},
    "LoRA, compiled": {"make": lambda: desugar.compile(with_lora("plain"), backend="eager", dynamic=True)},
    "checkpointing, compiled": {
        "make": lambda: desugar.compile(llama(), backend="eager", dynamic=True),
        "activation_checkpointing": True,
    },
}


def train(folder, collator, make=llama, **options):
    """Returns a trainer after its training, and its log; the last entry has the metrics of a prediction."""
    trainer = make_trainer(folder, collator, make, **options)
    trainer.train()
    logs = [*trainer.state.log_history, trainer.predict(EVALUATE).metrics]
    return trainer, [without_times(each) for each in logs]


@layouts
@pytest.mark.parametrize("name", OPTIONS)
def test_the_numbers_are_those_of_the_padded_run(name, layout, tmp_path):
    """As far as bfloat16 goes; there the accuracy of some hundred tokens jumps by one of them."""
    want, got = (train(tmp_path, each, **OPTIONS[name])[1] for each in (with_padding, LAYOUTS[layout]))
    assert_same_logs(got, want, **({"rel": 1e-2, "abs": 0.02} if name == "bfloat16" else {}))


@layouts
def test_predictions(layout, tmp_path):
    """Dense, with -100 behind each row; the metrics may ask for the tokens, too."""
    options = {"include_for_metrics": ["inputs", "loss"]}
    got, want = (
        make_trainer(tmp_path, collator, **more).predict(EVALUATE)
        for collator, more in ((LAYOUTS[layout], options), (with_padding, {}))
    )
    assert got.metrics["test_tokens"] == sum(len(row["input_ids"]) for row in EVALUATE)
    for number, row in enumerate(EVALUATE):
        length = len(row["input_ids"])
        assert got.label_ids[number, :length].tolist() == row["labels"]
        torch.testing.assert_close(
            *(torch.tensor(each.predictions[number, :length]) for each in (got, want)), atol=1e-5, rtol=1e-4
        )
        assert all((x[number, length:] == -100).all() for x in (got.label_ids, got.predictions))


@layouts
@pytest.mark.parametrize("compile_", [None, desugar.compile])
def test_a_run_goes_on_from_a_checkpoint(layout, compile_, tmp_path):
    make = (lambda: compile_(llama(), backend="eager", dynamic=True)) if compile_ else llama
    options = {"save_strategy": "steps", "save_steps": 4}
    trainer, whole = train(tmp_path, LAYOUTS[layout], make, **options)
    again = make_trainer(tmp_path, LAYOUTS[layout], make, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    steps, rest = (
        [log for log in each if "grad_norm" in log]
        for each in (whole, map(without_times, again.state.log_history))
    )
    assert rest == [pytest.approx(step) for step in steps] and len(steps) > 4
    trainer.save_model(tmp_path / "saved")
    torch.testing.assert_close(
        dict(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").named_parameters()),
        dict(trainer.model.named_parameters()),
    )


@pytest.mark.timeout(1800)  # Inductor compiles four graphs
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps(name, tmp_path):
    """Padded and ragged training log the same numbers, in eager mode and with Inductor.

    There is one program for training and one for evaluation. A compiled model saves the same files as the model.
    """
    runs: list = []
    for compile_, collator in product((None, desugar.compile), (with_padding, RaggedCollator())):
        model = MODELS[name]()
        fast = compile_(model, dynamic=True if collator is with_padding else None) if compile_ else model
        options = OPTIONS["smoothing and accumulation"] if name == "llama" else {}
        runs.append(train(tmp_path, collator, lambda fast=fast: fast, max_steps=20, **options))
        assert_same_logs(runs[-1][1], runs[0][1])
    assert len(fast.programs) == (4 if name == "gpt2" else 2)  # GPT-2 has a graph of its loss
    runs[-1][0].save_model(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(dict(saved.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("backend", "error", "words"),
    [
        ("desugar", ValueError, "'DESUGAR' is not a valid DynamoBackend"),
        ("aot_eager", RuntimeError, "Expected a JaggedTensor tangent but got a plain Tensor"),
    ],
)
def test_torch_compile_is_refused(backend, error, words, tmp_path):
    """By accelerate, which has a list of backends, and by PyTorch, which guesses the tangent of unused logits."""
    with pytest.raises(error, match=words):
        make_trainer(tmp_path, RaggedCollator(), torch_compile_backend=backend).train()


RUNS = {name: (each, llama) for name, each in {"ordinary": with_padding, **LAYOUTS}.items()} | {
    "compiled": (RaggedCollator(), lambda: desugar.compile(llama(), backend="eager"))
}


@on_ranks
def train_on_two_ranks(_, folder):
    os.environ |= dict.fromkeys(["RANK", "LOCAL_RANK"], str(dist.get_rank())) | {  # as torchrun does
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    for name, run in RUNS.items():
        trainer, logs = train(folder, *run, ddp_backend="gloo")
        torch.save((logs, trainer.model.state_dict()), folder / f"{name} {dist.get_rank()}")


def test_two_processes(tmp_path):
    """Two processes log the numbers of the padded run, and of one process with batches twice as large."""
    in_processes(train_on_two_ranks, tmp_path)
    found = {key: torch.load(tmp_path / "{} {}".format(*key)) for key in product(RUNS, range(2))}
    want, weights = found["ordinary", 0]
    for (_, rank), (logs, state) in found.items():
        assert rank or assert_same_logs(logs, want) is None
        torch.testing.assert_close(state, weights, atol=1e-4, rtol=1e-3)
    alone = [log for log in train(tmp_path, with_padding, per_device_train_batch_size=8)[1] if "loss" in log]
    assert [log["loss"] for log in want if "loss" in log][:4] == pytest.approx(
        [log["loss"] for log in alone][:4]
    )


# ---- loops without Trainer -------------------------------------------------------------------------------------


def losses_and_norms(collator, model, part=slice(None), *, rows=TRAIN, float16=False):
    """Six steps with AdamW and clipping, on a part of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=float16)
    steps = []
    for start in range(0, 24, 4):
        with torch.autocast("cpu", torch.float16, enabled=float16):
            loss = model(**collator(rows[start : start + 4][part])).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append((loss.item(), float(getattr(norm, "full_tensor", norm.detach)()), scaler.get_scale()))
    return torch.tensor(steps)


@layouts
def test_float16_with_a_scaler(layout):
    want, got = (losses_and_norms(each, llama(), float16=True) for each in (with_padding, LAYOUTS[layout]))
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


TARGETS = [{"input_ids": one["input_ids"], "labels": other["input_ids"]} for one, other in pairwise(TRAIN)]
COLUMNS = {
    "t5": TARGETS,
    "bart": TARGETS,
    "bert": [
        row
        | {"token_type_ids": [int(i > 2) for i, _ in enumerate(row["input_ids"])], "labels": row["input_ids"]}
        for row in TRAIN
    ],
}


@pytest.mark.parametrize("layout", ["jagged", "padded"])
@pytest.mark.parametrize("name", COLUMNS)
def test_other_columns(name, layout):
    """Targets with lengths of their own, of an encoder and a decoder; pairs of sentences."""
    model, rows = ZOO[name].build(), COLUMNS[name]
    model.config.use_cache = model.get_decoder().config.use_cache = False
    start = getattr(model.config, "decoder_start_token_id", None)
    collator = RaggedCollator(layout=layout, decoder_start=start)
    want = losses_and_norms(with_padding, copy.deepcopy(model), rows=rows)
    torch.testing.assert_close(losses_and_norms(collator, model, rows=rows), want, atol=1e-4, rtol=1e-4)


@on_ranks
def shard_on_two_ranks(mesh, folder):
    for name, (collator, _) in RUNS.items():
        model = llama()
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        call = desugar.compile(model, backend="eager") if name == "compiled" else model
        part = slice(dist.get_rank(), None, 2)
        torch.save(losses_and_norms(collator, call, part), folder / f"{name} {dist.get_rank()}")


def test_fully_shard_on_two_ranks(tmp_path):
    in_processes(shard_on_two_ranks, tmp_path)
    for name, rank in product(RUNS, range(2)):
        got, want = (torch.load(tmp_path / f"{each} {rank}") for each in (name, "ordinary"))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@layouts
def test_label_smoothing_without_a_count(layout):
    smooth, model = transformers.trainer_pt_utils.LabelSmoother(0.1), llama()
    losses = []
    for collator in (with_padding, LAYOUTS[layout]):
        batch = collator(TRAIN[:5])
        labels = batch.pop("labels")
        losses.append([smooth(model(**batch), labels, shift_labels=shift) for shift in (True, False)])
    torch.testing.assert_close(losses[1], losses[0])


@layouts
def test_accelerate(layout):
    losses, found = [], []
    for collator in (with_padding, LAYOUTS[layout]):
        accelerator, model = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TRAIN, batch_size=4, collate_fn=collator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses.append([])
        for batch in loader:
            with accelerator.accumulate(model):
                output = model(**batch)
                accelerator.backward(output.loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(output.loss.detach())
        padded = accelerator.pad_across_processes((output.logits.argmax(-1), batch["labels"]), 1, -100)
        found.append(accelerator.gather_for_metrics(padded))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-4)
    (got, labels), (want, padded) = found[1], found[0]
    assert torch.equal(labels[:, : padded.shape[1]], padded) and (labels[:, padded.shape[1] :] == -100).all()
    assert torch.equal(got[:, : padded.shape[1]][padded != -100], want[padded != -100])
