"""The file of a package: a `.pt2` archive in AOTInductor's layout.

    data/aotinductor/<library>/*     the libraries, which PyTorch's C++ loader finds by their names
    data/desugar/weights/<n>         the bytes of each plain tensor of the weights
    extra/desugar.json               the manifest
    extra/desugar.graphs.json        the plain graphs
    extra/desugar.digest             a digest of each entry but the weights

An archive is written beside its place and renamed. Reading takes only the entries that it knows, runs nothing, and
checks the digests of what it takes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from desugar import _torch as private
from desugar.errors import PackageError
from desugar.packages.manifest.records import TensorFacts

MANIFEST, GRAPHS, DIGESTS = "extra/desugar.json", "extra/desugar.graphs.json", "extra/desugar.digest"
_LIBRARIES, _WEIGHTS = "data/aotinductor/", "data/desugar/weights/"
_MOST_BYTES = 2**28  # of the manifest, the graphs and the digests: 256 MiB

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
        path: Its place.
        manifest: The manifest as JSON data.
        graphs: Name of a graph -> the graph as JSON data.
        libraries: Name of a library -> its files.
        weights: The plain tensors of the weights, contiguous and on the CPU.

    Raises:
        OSError: The file cannot be written; what was there before is unchanged.
    """
    entries = {MANIFEST: _to_bytes(manifest), GRAPHS: _to_bytes(graphs)}
    for name, files in libraries.items():
        entries |= {f"{_LIBRARIES}{name}/{file.name}": file.read_bytes() for file in files}
    entries[DIGESTS] = _to_bytes({name: _digest(content) for name, content in entries.items()})
    beside = path.parent / f".{path.stem}.{secrets.token_hex(6)}.pt2"
    try:
        writer = private.ArchiveWriter(str(beside))
        for name, content in {"archive_format": b"pt2", "archive_version": b"0", **entries}.items():
            writer.write_record(name, content, len(content))
        for number, tensor in enumerate(weights):
            storage: Any = tensor.untyped_storage()
            writer.write_record(f"{_WEIGHTS}{number}", storage, storage.nbytes())
        writer.write_end_of_file()
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _to_bytes(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ------------------------------------------------------------------------------------------------- reading


class Archive:
    """A package's file, open for reading.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str], sha256: str | None = None) -> None:
        """Opens a file.

        Raises:
            FileNotFoundError: There is none.
            PackageError: It is no package, or not the one with this digest.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"there is no file {self.path}: expected a package that desugar.save wrote"
            )
        if sha256 is not None and (found := file_digest(self.path)) != sha256.lower():
            raise PackageError(
                f"{self.path}: expected a file with the sha256 {sha256}, got {found}; nothing was loaded"
            )
        self._identity = _identity_of(self.path)
        try:
            self._reader = private.ArchiveReader(str(self.path))
            self._names = frozenset(self._reader.get_all_records())
        except RuntimeError as error:
            raise PackageError(f"{self.path} is no package that can be read: {_first_line(error)}") from error
        if MANIFEST not in self._names:
            raise PackageError(
                f"{self.path} is an archive, and no package of desugar.save: it has no {MANIFEST}"
            )
        self._digests = self._parse(DIGESTS, self._record(DIGESTS))
        if not isinstance(self._digests, dict):
            raise PackageError(f"{self.path}: {DIGESTS} does not fit its schema")

    def manifest(self) -> Any:
        """Returns the manifest as JSON data."""
        return self._parse(MANIFEST, self._checked(MANIFEST))

    def graphs(self) -> Any:
        """Returns the plain graphs as JSON data."""
        return self._parse(GRAPHS, self._checked(GRAPHS))

    def check_library(self, name: str) -> None:
        """Raises `PackageError` unless the files of a library are those that were written, and still in their place."""
        if _identity_of(self.path) != self._identity:
            raise PackageError(f"{self.path} was replaced since it was loaded: load it again")
        files = [entry for entry in self._names if entry.startswith(f"{_LIBRARIES}{name}/")]
        if not any(entry.endswith(".so") for entry in files):
            raise PackageError(f"{self.path}: the library {name!r} is missing")
        for entry in files:
            self._checked(entry)

    def weight(self, number: int, facts: TensorFacts, checksum: int) -> Tensor:
        """Returns plain tensor `number` of the weights, as a tensor of its own.

        Raises:
            PackageError: The file has other bytes than such a tensor.
        """
        size, stride = [int(n) for n in facts.size], [int(n) for n in facts.stride]  # type: ignore[arg-type]
        name, expected = f"{_WEIGHTS}{number}", _bytes_of(size, stride, facts.dtype.itemsize)
        if name not in self._names:
            raise PackageError(f"{self.path}: weight {number} is missing")
        content = self._storage(name, expected)
        if checksum_of(content) != checksum:
            raise PackageError(f"{self.path}: weight {number} is damaged: it is not what desugar.save wrote")
        tensor = torch.empty(0, dtype=facts.dtype).set_(content, 0, size, stride)  # type: ignore[call-overload]
        return tensor.to(facts.device)

    def _storage(self, name: str, expected: int) -> Any:
        found = self._reader.get_record_size(name)
        if found != expected:
            raise PackageError(f"{self.path}: {name}: expected {expected} bytes, got {found}")
        try:
            return self._reader.get_storage_from_record(name, expected, torch.uint8).untyped_storage()
        except RuntimeError as error:
            raise PackageError(f"{self.path}: {name} cannot be read: {_first_line(error)}") from error

    def _checked(self, name: str) -> bytes:
        content = self._record(name)
        if self._digests.get(name) != _digest(content):
            raise PackageError(f"{self.path}: {name} is damaged: it is not what desugar.save wrote")
        return content

    def _record(self, name: str) -> bytes:
        if name not in self._names:
            raise PackageError(f"{self.path} is no whole package: it has no {name}")
        if (size := self._reader.get_record_size(name)) > _MOST_BYTES:
            raise PackageError(f"{self.path}: {name} has {size} bytes; at most {_MOST_BYTES} are read")
        try:
            return self._reader.get_record(name)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise PackageError(f"{self.path}: {name} cannot be read: {_first_line(error)}") from error

    def _parse(self, name: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise PackageError(f"{self.path}: {name} is damaged: {error}") from error


def _identity_of(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _bytes_of(size: list[int], stride: list[int], itemsize: int) -> int:
    if len(size) != len(stride) or min([*size, *stride], default=0) < 0:
        raise PackageError(f"the manifest has a weight of size {size} and stride {stride}")
    if 0 in size:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * itemsize


def checksum_of(storage: Any) -> int:
    """Returns the CRC-32 of a storage on the CPU."""
    if storage.nbytes() == 0:
        return 0
    return zlib.crc32((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))


def file_digest(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
