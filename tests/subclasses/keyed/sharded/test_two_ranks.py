"""Two ranks over gloo: values, gradients, steps of optimizers, errors on all ranks, and checkpoints."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor
from subclasses.keyed.sharded import RowWise, RowWiseAdagrad, ShardingPlan, TableShard, shard
from tests.subclasses.keyed.sharded.ranks import (
    KEYS,
    LENGTHS,
    PLANS,
    assert_same_results,
    assert_same_rows,
    batches,
    joint_loss,
    loss_of,
    make_batch,
    make_collection,
    make_plan,
)
from tests.subclasses.ragged.ranks import group, in_processes, on_ranks

MODES = ["sum", "mean", "max", "none"]

# ---- values and gradients ----------------------------------------------------------------------------------


def compare(mesh, plan, parts, make, average=False):
    """One lookup and its gradients, sharded and whole; gradients of the tables may be averages over the ranks."""
    rank, whole = mesh.get_local_rank(), make()
    sharded, ranks = shard(whole, mesh, make_plan(plan), average_gradients=average), 2 if average else 1
    found = sharded(parts[rank])
    assert_same_results(found, whole(parts[rank]), exact=plan.startswith("rank"))
    loss_of(found, rank).backward()
    leaf = getattr(parts[rank], "leaf", None)
    if leaf is not None:
        of_weights, leaf.grad = leaf.grad, None
    (joint_loss(whole, parts) / ranks).backward()
    assert_same_rows(sharded, whole, lambda weight: weight.grad)
    if leaf is not None:
        torch.testing.assert_close(of_weights, leaf.grad * ranks)


OPTIONS = (
    {"padding_idx": 0},
    {"padding_idx": -1},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"sparse": True, "padding_idx": 0},
    {"dtype": torch.float64},
)


def has_gradient(mode, options):
    """PyTorch has none of sparse maxima; its bags divide by the frequency of another id, on the CPU."""
    return not (
        (mode == "max" and "sparse" in options) or (mode != "none" and "scale_grad_by_freq" in options)
    )


def with_ids(dtypes):
    """Batches of all lengths whose ids have these dtypes."""
    pairs = zip(batches("rows of all lengths"), dtypes, strict=True)
    return [KeyedJaggedTensor(KEYS, part.values.to(dtype), part.lengths) for part, dtype in pairs]


def with_a_frozen_table():
    """The rank whose own tables are frozen still returns gradients to the other one."""
    whole = make_collection("sum")
    whole.tables["b"].weight.requires_grad_(False)
    return whole


def lookups():
    """Plans, batches for each rank, a mode and options of tables."""
    every = "rows of all lengths"
    for mode, plan, lengths in itertools.product(MODES, PLANS, LENGTHS):
        yield plan, batches(lengths), mode, {}
    for sparse, plan, lengths in itertools.product((False, True), PLANS, LENGTHS):
        yield plan, batches(lengths, weighted=True), "sum", {"sparse": sparse}
    for options, mode, plan in itertools.product(OPTIONS, MODES, ("both", "rows")):
        if has_gradient(mode, options):
            yield plan, batches(every), mode, options
    for dtypes in ((torch.int32, torch.int32), (torch.int32, torch.int64)):
        yield "both", with_ids(dtypes), "mean", {}
    for mode in MODES:
        yield "both", [part.permute(["e", "b", "a"]) for part in batches(every)], mode, {}


def lookups_are_those_of_one_process(mesh):
    for plan, parts, mode, options in lookups():
        compare(mesh, plan, parts, partial(make_collection, mode, **options))
    compare(mesh, "both", batches("rows of all lengths"), with_a_frozen_table)
    for sparse in (False, True):
        parts = batches("rows of all lengths", weighted=True)
        compare(mesh, "both", parts, partial(make_collection, "sum", sparse=sparse), average=True)


def tables_may_have_several_dtypes(mesh):
    """A rank whose loss looks at one key alone takes part in all backwards."""

    def make():
        torch.manual_seed(0)
        return EmbeddingBagCollection(
            {
                k: nn.EmbeddingBag(6, 2, mode="sum", dtype=t)
                for k, t in {"a": torch.float32, "b": torch.float64}.items()
            }
        )

    rank, whole = mesh.get_local_rank(), make()
    sharded = shard(whole, mesh, ShardingPlan(dict.fromkeys("ab", RowWise())))
    x = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 5, 2, 4]), torch.tensor([1, 1, 1, 1]))
    found = sharded(x)
    assert_same_results(found, whole(x), exact=True)
    found["ab"[rank]].sum().backward()
    for key in "ab":
        whole(x)[key].sum().backward()
    assert_same_rows(sharded, whole, lambda weight: weight.grad)


def weights_may_require_grad_on_one_rank(mesh):
    rank, whole, parts = mesh.get_local_rank(), make_collection("sum"), batches("one row", weighted=True)
    part = parts[rank]
    for plan in PLANS:
        weights, sharded = part.leaf.detach().requires_grad_(rank == 1), shard(whole, mesh, make_plan(plan))
        loss_of(sharded(KeyedJaggedTensor(KEYS, part.values, part.lengths, weights=weights)), rank).backward()
        part.leaf.grad = None
        joint_loss(whole, parts).backward()
        if rank == 1:
            torch.testing.assert_close(weights.grad, part.leaf.grad)


def without_gradients(mesh):
    whole, part = make_collection("mean"), batches("rows of all lengths")[mesh.get_local_rank()]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = shard(whole, mesh, make_plan("both"))(part)
            assert not any(f.requires_grad for f in found.values())
            assert_same_results(found, whole(part), exact=False)


# ---- training ----------------------------------------------------------------------------------------------

DENSE = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "Adam of many": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "row-wise": lambda p: RowWiseAdagrad(p, 0.1),
}
SPARSE = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "row-wise": lambda p: RowWiseAdagrad(p, 0.1),
}


def training_is_that_of_one_process(mesh):
    rank = mesh.get_local_rank()
    optimizers = [(False, make) for make in DENSE.values()] + [(True, make) for make in SPARSE.values()]
    for sparse, make_optimizer in optimizers:
        whole = make_collection("sum", sparse=sparse)
        sharded = shard(whole, mesh, make_plan("both"))
        both = [make_optimizer([*module.parameters()]) for module in (whole, sharded)]
        for lengths in ("rows of all lengths", "no ids on one rank", "one row"):
            parts = batches(lengths)
            for _ in range(2):  # gradients accumulate
                joint_loss(whole, parts).backward()
                loss_of(sharded(parts[rank]), rank).backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_rows(sharded, whole)


class Model(nn.Module):
    """Embeddings and a layer on top."""

    def __init__(self, tables):
        super().__init__()
        torch.manual_seed(1)
        self.tables, self.top = tables, nn.Linear(3, 1)

    def forward(self, x):
        found = self.tables(x)
        return sum((self.top(found[key]) ** 2).sum() for key in "abe")


def the_other_parameters_may_be_replicated_or_sharded(mesh):
    """DDP and FSDP2 average the gradients of their parameters; `average_gradients` does so for the tables."""
    parts, whole = batches("rows of all lengths"), Model(make_collection("sum"))
    (sum(whole(part) for part in parts) / 2).backward()
    for way in ("DDP", "FSDP2"):
        model = Model(shard(make_collection("sum"), mesh, make_plan("both"), average_gradients=True))
        if way == "DDP":
            model.top = DistributedDataParallel(model.top)
        else:
            fully_shard(model, mesh=mesh, ignored_params=set(model.tables.parameters()))
        model(parts[mesh.get_local_rank()]).backward()
        for key in "abe":
            table, want = model.tables.tables[key], whole.tables.tables[key].weight.grad
            torch.testing.assert_close(table.weight.grad.local, want[table.start : table.stop])
        found = model.top.module.weight.grad if way == "DDP" else model.top.weight.grad.full_tensor()
        torch.testing.assert_close(found, whole.top.weight.grad)


# ---- state dicts and errors --------------------------------------------------------------------------------


def state_dicts_of_whole_tables(mesh):
    whole, other = make_collection("sum"), make_collection("sum", seed=1)
    sharded = shard(other, mesh, make_plan("both"))
    sharded.load_state_dict(whole.state_dict())
    assert_same_rows(sharded, whole)
    found = sharded.full_state_dict()
    assert list(found) == list(whole.state_dict())
    assert all(torch.equal(t, whole.state_dict()[name]) for name, t in found.items())
    with pytest.raises(RuntimeError, match=r"tables.a.weight: expected rows . to . of 7, got"):
        sharded.load_state_dict(shard(whole, mesh, make_plan("rows")).state_dict())


def tables_may_be_on_the_meta_device_first(mesh):
    with torch.device("meta"):
        other = make_collection("sum")
    sharded = shard(other, mesh, make_plan("both")).to_empty(device="cpu")
    assert type(sharded.tables["b"].weight) is TableShard
    assert sharded.tables["a"].weight is sharded.tables["d"].weight
    sharded.load_state_dict(make_collection("sum").state_dict())
    assert_same_rows(sharded, make_collection("sum"))


def one_key(key, *ids):
    return KeyedJaggedTensor([key], torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64))


def bad_batches_are_refused_on_all_ranks(mesh):
    rank, lengths = mesh.get_local_rank(), LENGTHS["rows of all lengths"][0]
    good, weighted = (make_batch(lengths, weighted=weighted) for weighted in (False, True))
    sharded, other_plan = (
        shard(make_collection("sum"), mesh, make_plan(plan)) for plan in ("both", ("both", "rows")[rank])
    )
    bad = [
        (one_key("z", 3), KeyError, "no table for z"),
        (one_key("a", 3, 7), ValueError, "ids from 0 to 6 for 'a'"),
        (one_key("a", 3, -1), ValueError, "ids from 0 to 6 for 'a'"),
        (torch.ones(2), TypeError, "expected a KeyedJaggedTensor"),
        (weighted.to(torch.float64), ValueError, "weights of the tables' dtype"),
    ]
    refused = [  # a module, and for each rank a batch, an error and words of it
        (sharded, (good, good.permute(KEYS[::-1])), [(ValueError, "the same keys")] * 2),
        (sharded, (good, weighted), [(ValueError, "weights of one dtype, or none")] * 2),
        (
            other_plan,
            (good, good),
            [(ValueError, "the same tables and plan on all ranks; ranks 0 and 1 differ")] * 2,
        ),
    ]
    for x, *expected in bad:
        refused.append((sharded, (x, good), (expected, (ValueError, "rank 0 refused its batch"))))
        refused.append((sharded, (good, x), ((ValueError, "rank 1 refused its batch"), expected)))
    for module, parts, errors in refused:
        with pytest.raises(errors[rank][0], match=errors[rank][1]):
            module(parts[rank])
    with pytest.raises(ValueError, match="gradients enabled"), torch.set_grad_enabled(rank == 0):
        sharded(good)
    compare(mesh, "both", batches("one row"), partial(make_collection, "sum"))  # all are where they were


CASES = [
    lookups_are_those_of_one_process,
    tables_may_have_several_dtypes,
    weights_may_require_grad_on_one_rank,
    without_gradients,
    training_is_that_of_one_process,
    the_other_parameters_may_be_replicated_or_sharded,
    state_dicts_of_whole_tables,
    tables_may_be_on_the_meta_device_first,
    bad_batches_are_refused_on_all_ranks,
]


@on_ranks
def all_cases(mesh, folder):
    """One spawn for all: the start of two processes takes as long as most cases together."""
    for case in CASES:
        try:
            case(mesh)
        except BaseException as error:
            error.add_note(f"in {case.__name__}, on rank {mesh.get_local_rank()}")
            raise
        (folder / f"{case.__name__}.{mesh.get_local_rank()}").touch()


@pytest.mark.slow
def test_two_ranks_give_what_one_process_gives(tmp_path):
    in_processes(all_cases, tmp_path)
    assert len([*tmp_path.glob("*.[01]")]) == 2 * len(CASES)


# ==== checkpoints =================================================================================================

# torch's own: of reading and writing without a process group, and of its typed storages.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # Adagrad's own
]

OPTIMIZERS = {
    "SGD": (False, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "Adam": (False, lambda p: torch.optim.Adam(p, 0.1)),
    "Adagrad": (False, lambda p: torch.optim.Adagrad(p, 0.1)),
    "sparse Adagrad": (True, lambda p: torch.optim.Adagrad(p, 0.1)),
    "row-wise": (False, lambda p: RowWiseAdagrad(p, 0.1)),
    "sparse row-wise": (True, lambda p: RowWiseAdagrad(p, 0.1)),
}

# ---- one process ------------------------------------------------------------------------------------------------


def train(module, optimizer, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()


def train_whole(name, steps):
    """The collection of one process after some steps."""
    sparse, make_optimizer = OPTIMIZERS[name]
    whole = make_collection("sum", sparse=sparse)
    train(
        whole,
        make_optimizer([*whole.parameters()]),
        lambda m: joint_loss(m, batches("rows of all lengths")),
        steps,
    )
    return whole


# ---- ranks -----------------------------------------------------------------------------------------------------


def make(mesh, name, plan, seed):
    sparse, make_optimizer = OPTIMIZERS[name]
    sharded = shard(make_collection("sum", seed, sparse=sparse), mesh, make_plan(plan))
    return sharded, make_optimizer([*sharded.parameters()])


def loss_here(mesh):
    """The loss of this rank's batch; of all batches where there is one rank only."""
    parts, rank = batches("rows of all lengths"), mesh.get_local_rank()
    return lambda m: joint_loss(m, parts) if mesh.size() == 1 else loss_of(m(parts[rank]), rank)


def save(mesh, plan, folder):
    """Trains for two steps, and saves tables and state."""
    for name in OPTIMIZERS:
        module, optimizer = make(mesh, name, plan, seed=0)
        train(module, optimizer, loss_here(mesh), 2)
        tables, state = get_state_dict(module, optimizer)
        dcp.save({"tables": tables, "state": state}, checkpoint_id=folder / name)


def load(mesh, plan, folder):
    """Loads into other tables, and goes on as one process does."""
    for name in OPTIMIZERS:
        module, optimizer = make(mesh, name, plan, seed=1)
        if name == "SGD":  # its state is made by the first step
            module(batches("one row")[mesh.get_local_rank()])["a"].sum().backward()
            optimizer.step()
        tables, state = get_state_dict(module, optimizer)
        found = {"tables": tables, "state": state}
        dcp.load(found, checkpoint_id=folder / name)
        set_state_dict(module, optimizer, model_state_dict=found["tables"], optim_state_dict=found["state"])
        assert_same_rows(module, train_whole(name, 2))
        train(module, optimizer, loss_here(mesh), 1)
        assert_same_rows(module, train_whole(name, 3))


def load_whole_tables(mesh, folder):
    """A checkpoint of the unsharded collection loads into shards, under any plan, and the reverse."""
    for plan in PLANS:
        sharded = shard(make_collection("none", seed=1), mesh, make_plan(plan))
        tables = sharded.state_dict()
        dcp.load(tables, checkpoint_id=folder / "whole")
        sharded.load_state_dict(tables)
        assert_same_rows(sharded, make_collection("none"))
        dcp.save(tables, checkpoint_id=folder / plan)


@on_ranks
def load_and_save(mesh, folder):
    load_whole_tables(mesh, folder)
    for plan in ("both", "rows"):
        load(mesh, plan, folder / "of one rank")
    save(mesh, "both", folder / "of two ranks")
    for plan in ("both", "rank 1"):
        load(mesh, plan, folder / "of two ranks")


@pytest.mark.slow
def test_checkpoints_load_on_other_numbers_of_ranks(tmp_path):
    whole = make_collection("none")
    with group(0, 1, tmp_path / "first store") as mesh:
        save(mesh, "rank 0", tmp_path / "of one rank")
        dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole")
    in_processes(load_and_save, tmp_path)
    with group(0, 1, tmp_path / "last store") as mesh:
        load(mesh, "rank 0", tmp_path / "of two ranks")
        load(mesh, "rows", tmp_path / "of one rank")
        for plan in PLANS:
            other = make_collection("none", seed=1)
            dcp.load(other.state_dict(), checkpoint_id=tmp_path / plan)
            assert all(map(torch.equal, other.parameters(), whole.parameters()))
