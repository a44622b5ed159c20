"""The last entries of a stream, in a buffer of fixed size.

The number of entries so far is a dynamic int, so that one compiled program serves all positions. `append` copies, and
is differentiable by the entry and by the buffer. `append_` writes into the storage, which its result shares, and is not
differentiable. `read` puts the entries in order, the oldest first. The script takes a moving average.

    python examples/classes/ring_buffer.py
"""

import torch
from torch import Tensor

import desugar
from subclasses import Outer, TensorSubclass, dynamic, inner


class RingBuffer(TensorSubclass):
    """`storage` [capacity, ...], and the number of entries that were appended to it."""

    storage: Tensor = inner(differentiable=True)
    count: int = dynamic(default=0)

    @staticmethod
    def outer(storage) -> Outer:
        if not storage.ndim or not storage.shape[0]:
            raise ValueError(
                f"a RingBuffer needs a capacity of 1 or more, not storage of {list(storage.shape)}"
            )
        return Outer(storage.shape, storage.stride(), storage_offset=storage.storage_offset())

    def append(self, entry: Tensor) -> "RingBuffer":
        """A buffer in which an entry takes the place of the oldest one."""
        storage = self.storage
        position = torch.full((1,), self.count % storage.shape[0], device=storage.device)
        entries = entry.expand(storage.shape[1:]).unsqueeze(0)
        return RingBuffer(storage.index_copy(0, position, entries), count=self.count + 1)

    def append_(self, entry: Tensor) -> "RingBuffer":
        """The same in the storage of this buffer, which is out of date then: go on with the result."""
        if self.requires_grad or entry.requires_grad:
            raise RuntimeError("append_ takes no gradients; use append, or detach the buffer and the entry")
        self.storage[self.count % self.storage.shape[0]] = entry
        return RingBuffer(self.storage, count=self.count + 1)

    def read(self) -> Tensor:
        """The entries that are held, the oldest first: a copy."""
        capacity = self.storage.shape[0]
        if self.count < capacity:
            return self.storage[: self.count].clone()
        return self.storage.roll(-(self.count % capacity), 0)


@desugar.compile(backend="eager")
def smooth(buffer: RingBuffer, entry: Tensor) -> tuple[RingBuffer, Tensor]:
    buffer = buffer.append_(entry)
    return buffer, buffer.read().mean(0)


def main() -> None:
    buffer = RingBuffer(torch.zeros(4))
    for step in range(100):
        buffer, mean = smooth(buffer, torch.tensor(float(step)))
    print(f"held {buffer.read().tolist()}, mean {mean}; {len(smooth.programs)} programs for 100 positions")


if __name__ == "__main__":
    main()
