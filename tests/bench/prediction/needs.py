"""Requirements of the tests of the fake device."""

import pytest

from bench.prediction import _torch as private

MISSING = private.missing_parts()
cuda_build = pytest.mark.skipif(
    bool(MISSING), reason=f"needs PyTorch's CUDA build (2.15, no GPU), lacks {' and '.join(MISSING)}"
)
