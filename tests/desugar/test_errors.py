"""The one error, and the user's line."""

from __future__ import annotations

import traceback

import optree
import pytest
import torch

import desugar
from desugar.errors import DesugarError, is_library_file, user_line


def test_the_message_says_what_where_and_what_to_do():
    error = DesugarError("x is odd", instead="use y", where="f.py:3: x")
    assert str(error) == "x is odd\n  where: f.py:3: x\n  instead: use y"
    assert (error.what, error.instead, error.where, error.stock_is_wrong) == (
        "x is odd",
        "use y",
        "f.py:3: x",
        False,
    )
    default = DesugarError("a", instead="b")
    assert default.where is not None and default.where.startswith(__file__), "the line that raises"
    assert isinstance(error, RuntimeError) and desugar.DesugarError is DesugarError


def test_the_user_line_is_the_innermost_that_is_ours_nor_torchs():
    line = user_line()
    assert line is not None and line.startswith(__file__) and line.endswith("line = user_line()")
    assert user_line(traceback.StackSummary.from_list([(torch.__file__, 3, "f", "x")])) is None


@pytest.mark.parametrize("folder", ["torch", "optree", "desugar"])
def test_a_users_folder_may_have_a_librarys_name(folder, tmp_path):
    path = tmp_path / folder / "model.py"
    assert not is_library_file(str(path))
    frames = [(str(path), 3, "f", "x"), (torch.__file__, 4, "g", "y")]
    assert user_line(traceback.StackSummary.from_list(frames)).startswith(f"{path}:3")


@pytest.mark.parametrize("module", [torch, optree, desugar, traceback], ids=lambda m: m.__name__)
def test_library_files(module):
    assert is_library_file(module.__file__)
    assert is_library_file("<string>") and not is_library_file(__file__)
    assert not is_library_file(pytest.__file__), "what is installed beside torch is somebody's"
