"""The files of the store, in PyTorch's cache folder.

Each key has a folder, with a file for each program of the key: programs of one key differ in their guards on sizes. A
file is written beside its final path and renamed, so that a reader in another process finds the whole file or none. Its
first line is a digest of the rest; a file that does not match is ignored. If the files take more than
`DESUGAR_STORE_BYTES` (default 1 GiB), the least recently used files are deleted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from desugar import _torch as torch_private

log = logging.getLogger("desugar")

SWITCH = "DESUGAR_STORE"  # environment variable: 0 switches the store off
LIMIT = "DESUGAR_STORE_BYTES"  # environment variable: how many bytes the files may take
_DEFAULT_LIMIT = 2**30
_KIND = "desugar_program"  # PyTorch's name for these files among its cache artifacts


def is_switched_on() -> bool:
    """Whether the environment and PyTorch's configuration allow programs to be stored."""
    return (
        os.environ.get(SWITCH, "1") not in ("", "0")
        and torch_private.can_store()
        and not torch_private.compiler_config.force_disable_caches
        and torch_private.functorch_config.enable_autograd_cache
        and torch_private.inductor_config.fx_graph_cache
    )


def folder() -> Path:
    """Returns the folder of the store."""
    return Path(torch_private.cache_dir()) / "desugar"


def write(key: str, name: str, content: bytes) -> None:
    """Writes a file of a key, and records it for `torch.compiler.save_cache_artifacts`; logs an `OSError`."""
    torch_private.CacheArtifactRecorder(_KIND, f"{key}/{name}").record(content)
    try:
        _write(folder() / key[:2] / key / name, content)
        _trim()
    except OSError as error:
        log.warning("a program cannot be stored: %s", error)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(digest(content).encode() + b"\n" + content)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def read(key: str, name: str) -> bytes | None:
    """Returns the content of a file of a key; None if there is none or it is damaged."""
    path = folder() / key[:2] / key / name
    try:
        stored_digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if stored_digest != digest(content).encode():
        log.warning("ignored a damaged file of the store of programs: %s", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # marks the file as used
    torch_private.CacheArtifactRecorder(_KIND, f"{key}/{name}").record(content)
    return content


def names(key: str) -> list[str]:
    """Returns the names of the files of a key, in order."""
    return sorted(path.name for path in (folder() / key[:2] / key).glob("[!.]*"))


def digest(content: bytes) -> str:
    """Returns the digest of the content of a file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# ----------------------------------------------------------------------------------------------- their bound


def _trim() -> None:
    """Deletes the files that were not used for the longest time, until the rest is below the limit."""
    limit = _limit()
    by_age = sorted(_files(), key=lambda file: file[0])
    total = sum(size for _, size, _ in by_age)
    for _, size, path in by_age:
        if total <= limit:
            return
        total -= size
        with contextlib.suppress(OSError):  # another process has deleted it
            os.unlink(path)


def _limit() -> int:
    given = os.environ.get(LIMIT)
    try:
        return _DEFAULT_LIMIT if given is None else int(given)
    except ValueError:
        log.warning("expected a number of bytes in %s, got %r; the limit is %d", LIMIT, given, _DEFAULT_LIMIT)
        return _DEFAULT_LIMIT


def _files() -> Iterator[tuple[float, int, Path]]:
    """Yields the time of last use, the size and the path of each file."""
    for path in folder().glob("*/*/*"):
        with contextlib.suppress(OSError):
            state = path.stat()
            yield state.st_mtime, state.st_size, path


# ------------------------------------------------------------------------------------------- as an artifact


@functools.cache
def _register_artifact(factory: Any) -> None:
    """Registers the files with `save_cache_artifacts` and `load_cache_artifacts`, which look up their kind."""

    class ProgramArtifact(torch_private.CacheArtifact):
        def populate_cache(self) -> None:
            key, _, name = self.key.partition("/")
            _write(folder() / key[:2] / key / name, self.content)

        @staticmethod
        def type() -> str:
            return _KIND

    factory.register(ProgramArtifact)


torch_private.after_import_of("CacheArtifactFactory", _register_artifact, optional=True)
