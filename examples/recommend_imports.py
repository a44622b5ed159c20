"""Two towers that learn which modules a Python file needs, from the standard library's own source.

A file is the names and the attributes that it uses, each with a weight for how often. Names that its import statements
bind are left out. A module is an item. Both are rows of a `KeyedJaggedTensor`: some files use five names and some two
thousand, so every batch has other lengths. One tower pools a file's names and attributes, and the other looks up the
module. The product of the two says how well they go together. Compiled, one program serves all batches.

    python examples/recommend_imports.py
"""

import argparse
import ast
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import desugar
from subclasses.keyed import EmbeddingBagCollection, KeyedJaggedTensor

KEYS = ("names", "attributes", "module")
Row = tuple[list[int], list[float]]  # ids and their weights


@dataclass
class Data:
    """The names and attributes of each file, key by key, and the modules that it imports."""

    sizes: dict[str, int]
    files: list[dict[str, Row]]
    imports: list[list[int]]


# ---- the data: no download, the interpreter brought it along --------------------------------------------------------


def read_file(path: Path) -> dict[str, Counter[str]]:
    """Names, attributes and imported modules of a file, each with its count."""
    counts: dict[str, Counter[str]] = {key: Counter() for key in KEYS}
    bound = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names):
                counts["module"].update(alias.name.partition(".")[0] for alias in names)
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                counts["module"][module.partition(".")[0]] += 1
                bound |= {alias.asname or alias.name for alias in names}
            case ast.Name(id=name):
                counts["names"][name] += 1
            case ast.Attribute(attr=name):
                counts["attributes"][name] += 1
    for name in bound:
        del counts["names"][name]
    return counts


def read_library(limit: int) -> Data:
    """The files of the standard library's first two levels that import something, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted([*root.glob("*.py"), *root.glob("*/*.py")])
    paths = [
        p for p in paths if p.parent.name not in ("test", "tests", "site-packages", "lib2to3", "idlelib")
    ]
    random.Random(0).shuffle(paths)
    raw = [read_file(path) for path in paths[:limit]]
    seen = {key: Counter(name for file in raw for name in file[key]) for key in KEYS}
    ids = {
        key: {name: i for i, name in enumerate(sorted(n for n, count in seen[key].items() if count > 2))}
        for key in KEYS
    }
    known = [
        {key: {ids[key][n]: c for n, c in file[key].items() if n in ids[key]} for key in KEYS} for file in raw
    ]
    known = [file for file in known if file["module"]]
    files = [{key: to_row(file[key]) for key in ("names", "attributes")} for file in known]
    return Data({key: len(ids[key]) for key in KEYS}, files, [list(file["module"]) for file in known])


def to_row(counts: dict[int, int]) -> Row:
    """Weights that grow slowly with the count, and whose squares add up to one."""
    weights = torch.tensor(list(counts.values())).log1p()
    return list(counts), F.normalize(weights, dim=0).tolist()


def make_batch(data: Data, files: list[int], modules: list[int]) -> KeyedJaggedTensor:
    """A row of each key for each pair of a file and a module."""
    rows: dict[str, list[Row]] = {key: [data.files[i][key] for i in files] for key in KEYS[:2]}
    rows["module"] = [([module], [1.0]) for module in modules]
    flat = [row for key in KEYS for row in rows[key]]
    return KeyedJaggedTensor(
        KEYS,
        torch.tensor([i for ids, _ in flat for i in ids]),
        torch.tensor([len(ids) for ids, _ in flat]),
        weights=torch.tensor([w for _, weights in flat for w in weights]),
    )


# ---- the model ------------------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """A vector for each file and one for each module of a batch."""

    def __init__(self, sizes: dict[str, int], width: int = 32) -> None:
        super().__init__()
        tables = {key: nn.EmbeddingBag(sizes[key], width, mode="sum") for key in KEYS}
        self.tables = EmbeddingBagCollection(tables)
        self.top = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        embeddings = self.tables(batch)
        return self.top(torch.cat([embeddings["names"], embeddings["attributes"]], 1)), embeddings["module"]


def loss_of(model: TwoTowers, batch: KeyedJaggedTensor, modules: Tensor, counts: Tensor) -> Tensor:
    """The loss of picking each file's module among all modules of the batch.

    The same module in another place does not count as a mistake. A batch holds popular modules more often. Subtracting
    the logarithm of their counts from the scores makes up for it (Yi et al., "Sampling-bias-corrected neural modeling
    for large corpus item recommendations", 2019).
    """
    file, module = model(batch)
    scores = file @ module.mT - counts[modules].log()
    same = (modules == modules.unsqueeze(1)).fill_diagonal_(False)
    return F.cross_entropy(scores.masked_fill(same, -torch.inf), torch.arange(len(modules)))


# ---- training -------------------------------------------------------------------------------------------------------


def train(
    data: Data, files: int, steps: int, compute_loss: Callable[..., Tensor]
) -> tuple[TwoTowers, list[float], float]:
    """A model trained on pairs of the first so many files, its losses, and milliseconds for a step."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model = TwoTowers(data.sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pairs = [(i, module) for i in range(files) for module in data.imports[i]]
    counts = 1 + torch.bincount(torch.tensor([module for _, module in pairs]), minlength=data.sizes["module"])
    losses, times = [], []
    for _ in range(steps):
        chosen = draw.choices(pairs, k=128)
        modules = [module for _, module in chosen]
        batch = make_batch(data, [i for i, _ in chosen], modules)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = compute_loss(model, batch, torch.tensor(modules), counts)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return model, losses, 1e3 * sorted(times)[len(times) // 2]


def recall(data: Data, files: range, best: Callable[[int], list[int]]) -> float:
    """The share of the files' imports that are among the five best modules for each."""
    hits = sum(len(set(best(i)) & set(data.imports[i])) for i in files)
    return hits / sum(min(5, len(data.imports[i])) for i in files)


@torch.no_grad()
def ranked(model: TwoTowers, data: Data, files: range) -> Callable[[int], list[int]]:
    """The five best modules for a file by a model."""
    modules = list(range(data.sizes["module"]))
    known = model(make_batch(data, [files[0]] * len(modules), modules))[1]
    wanted = model(make_batch(data, list(files), [0] * len(files)))[0]
    best = (wanted @ known.mT).topk(5).indices.tolist()
    return lambda i: best[i - files[0]]


def main() -> None:
    """Trains in eager mode and compiled, and prints the losses, the share of right guesses, and the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=400, help="how many files to read")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--backend", default="inductor", help="of desugar.compile")
    options = parser.parse_args()

    data = read_library(options.files)
    split = len(data.files) * 4 // 5
    held_out = range(split, len(data.files))
    sizes = ", ".join(f"{count} {key}" for key, count in data.sizes.items())
    print(f"{len(data.files)} files, {len(held_out)} of them held out; {sizes.replace('module', 'modules')}")
    popular = Counter(module for imports in data.imports[:split] for module in imports).most_common(5)
    guessed = recall(data, held_out, lambda _: [module for module, _ in popular])
    print(f"the five most imported modules: {guessed:.0%} of the held-out files' imports")

    compiled = desugar.compile(loss_of, backend=options.backend)
    curves = []
    for name, compute_loss in (("eager", loss_of), ("compiled", compiled)):
        model, losses, milliseconds = train(data, split, options.steps, compute_loss)
        curves.append(torch.tensor(losses))
        print(
            f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, the five best "
            f"{recall(data, held_out, ranked(model, data, held_out)):.0%}, {milliseconds:.1f} ms a step"
        )
    print(f"programs: {len(compiled.programs)} for {options.steps} batches of other lengths")
    difference = (curves[0] - curves[1]).abs().max().item()
    print(f"the losses differ by {difference:.1g} at most")


if __name__ == "__main__":
    main()
