"""The stages: a name, a limit, and the question that each answers. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A part of the run, in a process of its own.

    Attributes:
        name: The name in lines and on the command line.
        seconds: The process is killed after this time.
        question: The question that the figures answer.
        function: The module and the function, which takes a `Run`.
        shards: The number of processes of the stage `warm` that compile its subjects beforehand.
        needs_library: Whether each subject needs this project's packages, which an older PyTorch may not support.
    """

    name: str
    seconds: float
    question: str
    function: str
    shards: int = 1
    needs_library: bool = True


def _stage(name: str, seconds: float, function: str, shards: int = 1, *, question: str) -> Stage:
    module = function.partition(":")[0]
    needs_library = module not in ("basics", "warm", "int8")  # the others have no rivals that run without
    return Stage(name, seconds, question, f"bench.gpu.stages.{function}", shards, needs_library)


# The most important questions come first. The limits add up to more than a run has, since few stages reach theirs.
STAGES = (
    _stage(
        "basics",
        30,
        "basics:measure_basics",
        0,
        question="Which versions and kernels are there, and how long does a launch take?",
    ),
    _stage(
        "warm",
        80,
        "warm:compile_all",
        0,
        question="Nothing is timed: compiles the subjects of the other stages.",
    ),
    _stage(
        "model",
        50,
        "model:measure_model",
        2,
        question="Does a training step of a model wait for the host or for kernels?",
    ),
    _stage(
        "recorded",
        30,
        "recorded:measure_recorded",
        question="Does a recorded training step give the loss of an eager one?",
    ),
    _stage(
        "training",
        110,
        "training:measure_training",
        3,
        question="A layer on uneven rows: as fast as varlen by hand, in how much memory?",
    ),
    _stage(
        "int8",
        120,
        "int8:measure_int8",
        4,
        question="Int8 weights at decode: how far above the floor, beside bf16, fp8, torchao, gemlite?",
    ),
    _stage("chain", 30, "int8:measure_chain", question="The seven linear layers of one block as one graph."),
    _stage(
        "counters",
        40,
        "counters:measure_counters",
        0,
        question="Which bytes does the kernel for 16 rows read from L2 and from memory?",
    ),
    _stage(
        "dynamic",
        30,
        "int8:measure_dynamic",
        question="How much time does quantizing the activations in the call add?",
    ),
    _stage(
        "padded", 60, "padded:measure_padded", question="A prefix encoded again in buckets, with CUDA graphs."
    ),
    _stage(
        "calls",
        50,
        "calls:measure_calls",
        question="How much host time does a wrapped argument add, apart from launches?",
    ),
    _stage(
        "events", 20, "calls:measure_events", question="Does a wrapped step wait more often than a plain one?"
    ),
    _stage("keyed", 30, "keyed:measure_keyed", question="Lookups of many tables beside nn.EmbeddingBag."),
)
BY_NAME = {stage.name: stage for stage in STAGES}
