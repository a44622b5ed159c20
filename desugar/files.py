"""Where the generated wrappers claim to live."""

from __future__ import annotations

import os

import torch

# Below a directory of torch's, so that Dynamo does not trace a wrapper; the file need not exist.
WRAPPER_FILE = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "desugar_wrapper.py")
