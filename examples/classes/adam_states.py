"""States of AdamW in eight bits: float8 numbers, and a scale for each block of them.

PyTorch's AdamW runs as it is: `lerp_`, `mul_` and `addcmul_` write to a state, which is computed in float32 and rounded
again. A parameter's two states take 2.03 bytes a number in blocks of 256, instead of 8. The script trains a network
with states of both kinds.

    python examples/classes/adam_states.py
"""

import torch
from torch import Tensor, nn

from subclasses import TensorSubclass, inner, static

aten = torch.ops.aten
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class State8(TensorSubclass, size_from="codes", dtype_from="scale", fallback="materialize"):
    """Numbers of a state; the largest of a block of them, in the order of memory, is the largest number of float8."""

    codes: Tensor = inner(dtype=torch.float8_e4m3fn)
    scale: Tensor = inner(shape="blocks")
    block: int = static(default=256)

    def materialize(self) -> Tensor:
        scale = self.scale.repeat_interleave(self.block)[: self.codes.numel()].view(self.codes.shape)
        return self.codes.to(scale.dtype) * scale

    @classmethod
    def from_float(cls, x: Tensor, block: int = 256) -> "State8":
        """The nearest numbers; the last block may have fewer."""
        numbers = nn.functional.pad(x.detach().flatten(), (0, -x.numel() % block)).view(-1, block)
        scale = numbers.abs().amax(1).clamp(min=torch.finfo(x.dtype).tiny) / LARGEST
        codes = (numbers / scale.unsqueeze(1)).flatten()[: x.numel()].view(x.shape)
        return cls(codes.to(torch.float8_e4m3fn), scale, block=block)


@State8.implements(aten.lerp.Scalar, aten.mul.Tensor, aten.addcmul)
def compute(func, *args, **kwargs):
    numbers = [t.materialize() if isinstance(t, State8) else t for t in args]
    block = next(t.block for t in args if isinstance(t, State8))
    return State8.from_float(func(*numbers, **kwargs), block)


def quantize_states(optimizer: torch.optim.Optimizer, block: int = 256, least: int = 4096) -> None:
    """Rounds the states of an AdamW with `foreach=False`, after each step that makes them, if they are large."""

    def quantize(optimizer, args, kwargs):
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if type(state[name]) is Tensor and state[name].numel() >= least:
                    state[name] = State8.from_float(state[name], block)

    optimizer.register_step_post_hook(quantize)


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    states = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return sum(s.codes.nbytes + s.scale.nbytes if isinstance(s, State8) else s.nbytes for s in states)


def main() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    target = x.square().mean(1, keepdim=True) - 1
    for name in ("float32", "eight bits"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        if name == "eight bits":
            quantize_states(optimizer)
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
        print(f"states in {name:10}: {bytes_of(optimizer):7,} bytes, loss {loss.item():.1e}")


if __name__ == "__main__":
    main()
