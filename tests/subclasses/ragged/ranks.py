"""Starts ranks as processes, for tests of distributed code."""

import contextlib
import datetime
import functools
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


@contextlib.contextmanager
def group(rank, world, store):
    """The mesh of a process group; a rank that waits in vain fails soon."""
    timeout = datetime.timedelta(seconds=60)
    address = f"file://{store}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timeout)
    try:
        yield dist.init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def on_ranks(run):
    """A function of a mesh and a folder, run by each rank."""

    @functools.wraps(run)
    def start(rank, folder, world):
        torch.set_num_threads(1)
        with group(rank, world, folder / f"store of {run.__name__}") as mesh:
            run(mesh, folder)

    return start


def run_and_leave(rank, start, folder, world):
    """Ends without finalization, in which processes with a gloo group abort now and then (torch 2.13)."""
    start(rank, folder, world)
    os._exit(0)


def in_processes(start, folder, world=2):
    """Processes of their own: one forked after a backward may not run another where there is CUDA."""
    mp.start_processes(run_and_leave, (start, folder, world), nprocs=world, start_method="spawn")
