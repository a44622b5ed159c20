"""The file of a package: a `.pt2` archive in AOTInductor's layout.

- `data/aotinductor/<library>/*`: the libraries, which PyTorch's C++ loader finds by their names
- `data/desugar/weights/<n>`: the bytes of each plain tensor of the weights
- `extra/desugar.json`: the manifest
- `extra/desugar.graphs.json`: the plain graphs

`write_archive` writes a file beside the target and renames it. The archive is a zip file with a CRC-32 for each entry.
:class:`Archive` reads only the entries listed above, checks the CRC-32 of each, and runs no code of the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as torch_private
from desugar.errors import PackageError
from desugar.packages.manifest.records import FORMAT, TensorFacts

MANIFEST, GRAPHS = "extra/desugar.json", "extra/desugar.graphs.json"
_LIBRARIES, _WEIGHTS = "data/aotinductor/", "data/desugar/weights/"

# ------------------------------------------------------------------------------------------------- writing


def write_archive(
    path: Path,
    manifest: Any,
    graphs: Mapping[str, Any],
    libraries: Mapping[str, Iterable[Path]],
    weights: Iterable[Tensor],
) -> None:
    """Writes a package.

    Args:
        path: The path of the file.
        manifest: The manifest as JSON data.
        graphs: Name of a graph -> the graph as JSON data.
        libraries: Name of a library -> its files.
        weights: The plain tensors of the weights, contiguous and on the CPU.

    Raises:
        OSError: The file cannot be written; an earlier file is unchanged.
    """
    entries = {"archive_format": b"pt2", "archive_version": b"0"}
    for name, data in {MANIFEST: manifest, GRAPHS: graphs}.items():
        entries[name] = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    for name, files in libraries.items():
        entries |= {f"{_LIBRARIES}{name}/{file.name}": file.read_bytes() for file in files}
    beside = path.parent / f".{path.stem}.{secrets.token_hex(6)}.pt2"
    try:
        writer = torch_private.ArchiveWriter(str(beside))
        for name, content in entries.items():
            writer.write_record(name, content, len(content))
        for number, tensor in enumerate(weights):
            storage: Any = tensor.untyped_storage()
            writer.write_record(f"{_WEIGHTS}{number}", storage, storage.nbytes())
        writer.write_end_of_file()
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------------------------- reading


class Archive:
    """A package's file, open for reading.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str], sha256: str | None = None) -> None:
        """Opens a file.

        Raises:
            FileNotFoundError: The file does not exist.
            PackageError: The file is not a package, or has another digest.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"there is no file {self.path}: expected a package that desugar.save wrote"
            )
        if sha256 is not None and (digest := file_digest(self.path)) != sha256.lower():
            raise PackageError(
                f"{self.path}: expected a file with the sha256 {sha256}, got {digest}; nothing was loaded"
            )
        self._identity = _identity_of(self.path)
        try:
            self._file = zipfile.ZipFile(self.path)
        except zipfile.BadZipFile as error:
            raise PackageError(f"{self.path} is not a package that can be read: {error}") from error
        # The name of each entry begins with the archive's name, as in files of `torch.save`.
        self._entries = {entry.filename.partition("/")[2]: entry for entry in self._file.infolist()}
        if MANIFEST not in self._entries:
            raise PackageError(
                f"{self.path} is an archive, and no package of desugar.save: it has no {MANIFEST}"
            )

    def manifest(self) -> tuple[dict[str, str], Any]:
        """Returns the fingerprint of each class by its name, and the manifest as JSON data."""
        data = self.json(MANIFEST)
        is_known = isinstance(data, dict) and data.get("format") == FORMAT
        if not is_known or not isinstance(data.get("classes"), dict):
            raise PackageError(f"{self.path}: expected a package of format {FORMAT}, got another one")
        return data["classes"], data.get("manifest")

    def json(self, name: str) -> Any:
        """Returns the data of an entry: the manifest or the plain graphs."""
        try:
            return json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            raise PackageError(f"{self.path}: {name} is damaged: {error}") from error

    def check_library(self, name: str) -> None:
        """Raises `PackageError` if the archive was replaced, or a file of the library is missing or damaged."""
        if _identity_of(self.path) != self._identity:
            raise PackageError(f"{self.path} was replaced since it was loaded: load it again")
        files = [entry for entry in self._entries if entry.startswith(f"{_LIBRARIES}{name}/")]
        if not any(entry.endswith(".so") for entry in files):
            raise PackageError(f"{self.path}: the library {name!r} is missing")
        for entry in files:
            self._read(entry)

    def weight(self, number: int, facts: TensorFacts) -> Tensor:
        """Returns plain tensor `number` of the weights, in a new storage.

        Raises:
            PackageError: The entry is missing or damaged, or has another length than the tensor.
        """
        size, stride = [int(n) for n in facts.size], [int(n) for n in facts.stride]  # type: ignore[arg-type]
        memory = torch.empty(length_of(size, stride), dtype=facts.dtype)
        content = self._read(f"{_WEIGHTS}{number}")
        if len(content) != memory.nbytes:
            raise PackageError(
                f"{self.path}: weight {number}: expected {memory.nbytes} bytes, got {len(content)}"
            )
        ctypes.memmove(memory.data_ptr(), content, len(content))
        tensor = torch.empty(0, dtype=facts.dtype).set_(memory.untyped_storage(), 0, size, stride)  # type: ignore[call-overload]
        return tensor.to(facts.device)

    def _read(self, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise PackageError(f"{self.path} is not a whole package: it has no {name}")
        try:
            return self._file.read(entry)
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            raise PackageError(f"{self.path}: {name} is damaged: {error}") from error


def _identity_of(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def length_of(size: Iterable[int], stride: Iterable[int]) -> int:
    """Returns the number of elements that the memory of a tensor spans, from the first to the last."""
    extents = list(zip(size, stride, strict=True))
    return 0 if any(n == 0 for n, _ in extents) else 1 + sum((n - 1) * step for n, step in extents)


def file_digest(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
