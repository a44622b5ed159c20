"""One process of a job that torchrun starts, on the device that the machine has."""

import datetime

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)  # of a collective, where another rank does not answer


def start_rank() -> torch.device:
    """Joins the group of all processes, and returns the device of this one; without torchrun there is one process."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank(fallback_rank=0))
        torch.accelerator.set_device_index(device)
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=TIMEOUT, **alone)
    return device


def say(line: str) -> None:
    """Prints on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)
