"""The packages and the compiled kernels that a device without a network gets along with the sources.

python -m bench.gpu.wheels               # here: `make bench-gpu-bring` downloads the wheels, and says their size
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "bench-gpu"
# The rivals, and the imports of the library and of these benchmarks. The device already has torch and Triton.
PACKAGES = ("optree", "rich", "markdown-it-py", "mdurl", "pygments", "torchao", "gemlite", "tqdm")
UNPINNED = {"gemlite": "0.6.0.post2"}  # no benchmark on a CPU uses it, so constraints.txt does not name it
MOST = 40 * 2**20  # bytes that a device takes along
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 26, 27, 28, 31, 34)))
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
PART = 15 * 2**20  # bytes of one file that comes back from the device

# ---------------------------------------------------------------------------------------------------------
# here
# ---------------------------------------------------------------------------------------------------------


def pins() -> list[str]:
    """Returns the packages with their versions."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {
        name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    return [f"{name}=={UNPINNED.get(name) or versions[name]}" for name in PACKAGES]


def download(folder: Path, python: str) -> int:
    """Downloads a wheel of each package for another machine; a package of sources alone is built here.

    Returns:
        The exit status: 1 if a wheel is missing, or if all together are too large.
    """
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip"]
    for pin in pins():
        target = [arg for platform in PLATFORMS for arg in ("--platform", platform)]
        options = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *target]
        ways = (
            [*pip, "download", "--quiet", "--no-deps", *options, "--dest", str(wheels), pin],
            [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), pin],
        )
        if all(subprocess.run(way, capture_output=True, check=False).returncode for way in ways):
            print(
                f"expected a wheel of {pin} for Python {python}, found none: its figures will be missing",
                file=sys.stderr,
            )
    files = sorted(wheels.glob("*.whl"))
    size = sum(path.stat().st_size for path in files)
    for path in files:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    print(f"{size / 2**20:6.1f} MiB  in {wheels}; at most {MOST / 2**20:.0f} are to be taken along")
    return int(len(files) < len(PACKAGES) or size > MOST)


# ---------------------------------------------------------------------------------------------------------
# on the device
# ---------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Sets the caches of the compilers, and installs the wheels that this machine lacks; stages inherit both."""
    _unpack(folder)
    for name, part in CACHES.items():
        os.environ[name] = str((folder / "cache" / part).resolve())
    site = (folder / "site").resolve()
    paths = [str(ROOT), str(site), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    announce(site)
    missing = [str(path) for path in sorted((folder / "wheels").glob("*.whl")) if not _is_there(path, site)]
    if missing:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(site),
        ]
        done = subprocess.run([*command, *missing], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"no wheel was installed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)


def announce(site: Path) -> None:
    """Names this project's entry points in a folder on the path: sources that nobody installed have none.

    PyTorch finds the backend "desugar" by its entry point, in `desugar.compile` too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _is_there(wheel: Path, site: Path) -> bool:
    name = wheel.name.partition("-")[0]
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return any(site.glob(f"{name}-*.dist-info"))


def pack(folder: Path, back: Path) -> None:
    """Writes the caches to a folder that comes back, in parts, for a later run to start with."""
    archive = back / "cache.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        if (folder / "cache").exists():
            file.add(folder / "cache", "cache")
    if archive.stat().st_size > PART:
        data = archive.read_bytes()
        archive.unlink()
        for number, start in enumerate(range(0, len(data), PART)):
            (back / f"cache.tar.gz.{number}").write_bytes(data[start : start + PART])


def _parts(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("cache.tar.gz*"), key=lambda path: (len(path.name), path.name))


def _unpack(folder: Path) -> None:
    """Unpacks the caches of an earlier run, once: `cache.tar.gz` or its parts, put into the folder."""
    parts = [*_parts(folder)]
    if parts and not (folder / "cache").exists():
        archive = folder / "whole.tar.gz"
        archive.write_bytes(b"".join(path.read_bytes() for path in parts))
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        archive.unlink()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--python", default="3.12", help="the version on the device")
    options = parser.parse_args()
    return download(options.folder, options.python)


if __name__ == "__main__":
    sys.exit(main())
