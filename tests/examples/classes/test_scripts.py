"""Each class of the gallery shows itself at work as a script."""

import importlib

import pytest

SCRIPTS = {
    "adam_states": ["states in float32   : 661,512 bytes", "states in eight bits: 172,552 bytes, loss "],
    "block_sparse": [
        "64 of 64 blocks: 262144 bytes, error of a product 0.0%",
        " 8 of 64 blocks:  32768 bytes",
    ],
    "float8": ["weight: 8192 bytes, in float8 2052", "desugar.compile  error beside float32 3."],
    "int4_kernel": ["torch.ops.gallery.int4_linear.default", "error beside float32"],
    "int4_weight": ["groups of  16:  49152 bytes instead of 262144"],
    "log_probability": ["log-likelihood -24", "as a probability 0.0e+00"],
    "low_rank": ["200 multiplications per row instead of 2400, error 0."],
    "masked": ["means tensor([68.9", "gradient tensor([[0.9"],
    "master_weight": [
        "float32 master  torch.float32, largest error 0.00",
        "torch.bfloat16, largest error 0.2",
    ],
    "mxfp8": ["16896 bytes instead of 65536", "a scale for each 32 median error of a number 2."],
    "named": ["dims ('day', 'product'), variances tensor([1.0000"],
    "nf4": ["17412 bytes instead of 131072", "step 200: mean squared error 1."],
    "nvfp4": ["36868 bytes instead of 262144, error of a product 9."],
    "quantity": ["energy 196.2 kg m^2 s^-2", "19.62", "kg m^2 s^-2 and kg in one sum or comparison"],
    "quaternion": ["found with an error of 0.000"],
    "ring_buffer": ["held [96.0, 97.0, 98.0, 99.0], mean 97.5"],
    "uncertain": ["resistance 5.050 +- 0.130"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "log_probability" else ()) for n in SCRIPTS]
)
def test_the_script(name, capsys):
    importlib.import_module(f"classes.{name}").main()
    out = capsys.readouterr().out
    assert all(words in out for words in SCRIPTS[name]), out
    assert "nan" not in out
