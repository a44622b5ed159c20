"""Every declared class refuses methods of ``Tensor`` that would read memory which a wrapper does not have."""

import numpy as np
import pytest
import torch

from tests.subclasses.subjects import Scaled, make_pair
from tests.tables import raising

# PyTorch's own methods end the process with a segmentation fault here, or read memory at address zero.
test_memory_that_a_wrapper_does_not_have = raising(
    [
        (lambda read=read, make=make: read(make()), words)
        for read in (torch.from_dlpack, np.from_dlpack, lambda x: x.apply_(lambda n: n + 1))
        for make, words in (
            (make_pair, r"a Pair has none of its own; call it on an inner tensor \(x\.a\)$"),
            (
                lambda: Scaled(torch.ones(3), torch.tensor(2.0)),
                r"or on x\.materialize\(\)$",
            ),
        )
    ]
)


def test_requires_grad_of_what_has_a_history():
    """A result already records gradients, so `requires_grad_()` has no effect; only a leaf can stop recording."""
    x = make_pair().requires_grad_() * 2
    assert x.requires_grad_() is x and x.requires_grad and not x.is_leaf
    with pytest.raises(RuntimeError, match="leaf"):
        x.requires_grad_(False)
