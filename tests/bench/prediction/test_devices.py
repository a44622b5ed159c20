import pytest
import torch

from bench.prediction.devices import DEVICES, find_device
from tests.tables import giving

test_the_table = giving(
    {
        "its devices": (lambda: set(DEVICES), {"h100", "h200", "a100", "l4", "b200"}),
        "a device by its name or itself": (
            lambda: [find_device(one).name for one in ("H100", DEVICES["h100"])],
            ["h100", "h100"],
        ),
        "newer devices are faster": (
            lambda: sorted(set(DEVICES) - {"l4"}, key=lambda name: DEVICES[name].bandwidth),
            ["a100", "h100", "h200", "b200"],
        ),
    }
)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_figures_of_a_device_agree_with_each_other(device):
    assert device.source and device.title.startswith("NVIDIA")
    flops = device.flops
    assert flops[torch.float32] == device.vector < flops[torch.bfloat16] == flops[torch.float16]
    assert flops[torch.int8] == pytest.approx(2 * flops[torch.bfloat16], rel=0.01)
    assert (torch.float8_e4m3fn in flops) == (device.capability >= (8, 9))
    # Operations for each byte of memory: a unit that is wrong by 1000 lies far outside.
    assert 100 < flops[torch.bfloat16] / device.bandwidth < 600
    properties = device.properties
    assert (properties.major, properties.minor) == device.capability
    assert properties.multi_processor_count == device.multiprocessors
    assert properties.shared_memory_per_block_optin < properties.shared_memory_per_multiprocessor


def test_an_unknown_device_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"expected a device of the table \(h100, h200.*got 'v100'"):
        find_device("v100")
