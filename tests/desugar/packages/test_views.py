"""Results that are views: of arguments, of results, and of tensors inside of arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import desugar
from desugar import PackageError
from tests.desugar.packages.test_files import in_json, rewrite
from tests.desugar.packages.test_inference import rows

OF_TENSORS = {
    "t": lambda x: x.t(),
    "row": lambda x: x[0],
    "rest": lambda x: x[1:],
    "flat": lambda x: x.view(-1),
    "columns": lambda x: x[:, :2],
    "diagonal": lambda x: x.diagonal(),
    "expanded": lambda x: x.unsqueeze(1).expand(x.shape[0], 3, x.shape[1]),
}
OF_ROWS = {
    "values": lambda r: r.values,
    "column": lambda r: r.values[:, 0],
    "t": lambda r: r.values.t(),
    "flat": lambda r: r.values.view(-1),
}


def check_view(package, fn, x, base):
    with torch.no_grad():
        got, want = package(x), fn(x)
    assert torch.equal(got, want) and (not want.numel() or got.stride() == want.stride())
    assert got.data_ptr() == want.data_ptr(), "it is a view of the same memory"
    assert got._is_view() == want._is_view() and got._version == base._version
    if got.numel():
        got.zero_()
        assert not want.any() and got._version == base._version


SIZES = (4, 3), (6, 5), (3, 3)
ROWS = (3, 1), (2, 0, 5), (1,)
VIEWS = {
    **{name: (fn, torch.randn, SIZES, lambda x: x) for name, fn in OF_TENSORS.items()},
    "one row": (OF_TENSORS["t"], torch.randn, ((4, 3), (1, 1), (1, 5), (7, 1)), lambda x: x),
    "no rows": (OF_TENSORS["t"], torch.randn, ((0, 3), (0, 5)), lambda x: x),
    **{f"rows: {name}": (fn, rows, ROWS, lambda r: r.values) for name, fn in OF_ROWS.items()},
    "rows: offsets": (lambda r: r.offsets[0], rows, ROWS, lambda r: r.offsets),
}


@pytest.mark.parametrize("name", VIEWS)
def test_of_an_argument_or_a_tensor_inside_of_it(pack, name):
    fn, make, sizes, base_of = VIEWS[name]
    package = pack(fn, desugar.call(make(*sizes[0])), dynamic=True if make is torch.randn else None)
    for size in sizes:
        x = make(*size)
        check_view(package, fn, x, base_of(x))


def test_with_gradients(pack):
    def fn(x, r):
        return x.t(), r.unwrap("values")[:, 0], (x * 2).sum() + (r * 2).values.sum()

    def leaves(n, *lengths):
        return torch.randn(n, 3, requires_grad=True), rows(*lengths).requires_grad_()

    package = pack(fn, desugar.call(*leaves(4, 3, 1)), training=True, dynamic=True)
    for x, r in (leaves(4, 3, 1), leaves(6, 2, 0, 5)):
        found = []
        for function in (package, fn):
            transposed, column, total = function(x, r)
            found.append(grads_of(transposed.square().sum() + column.square().sum() + total, x, r))
        assert all(torch.allclose(mine, theirs) for mine, theirs in zip(*found, strict=True))


def grads_of(loss: Tensor, x: Tensor, r: Tensor) -> list[Tensor]:
    by_x, by_r = torch.autograd.grad(loss, (x, r))
    return [by_x, by_r.values]


@pytest.mark.parametrize(
    ("fn", "make", "dynamic"),
    [
        (lambda r: r[:, :, 0], lambda: (rows(3, 1),), None),  # a wrapper
        (lambda x: x.view(torch.int32), lambda: (torch.randn(4, 3),), None),  # of another dtype
        (lambda r: r.offsets[1:], lambda: (rows(3, 1),), None),  # one less than a size
        (lambda x, n: x[n:], lambda: (torch.randn(4, 3), 2), True),  # begins where its base does not say
    ],
)
def test_what_cannot_be_saved(pack, fn, make, dynamic):
    with pytest.raises(
        PackageError, match=r"view of an argument .*return a clone|depends on data, or on no argument"
    ):
        desugar.save(pack.path, fn, desugar.call(*make()), native=False, dynamic=dynamic)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"path": ["__dict__"]}, "'__dict__' is not a name of an inner tensor"),
        ({"path": ["lambda"]}, "'lambda' is not a name"),
        ({"reads": [[0, "__len__", 0]]}, "does not fit its schema .*__len__"),
    ],
)
def test_a_view_that_cannot_be(pack, changed, said):
    pack(OF_TENSORS["t"], desugar.call(torch.randn(4, 3)), dynamic=True)

    def change(data):
        (view,) = data["manifest"]["programs"][0]["spec"]["interface"]["outputs"]["values"]
        view["replay"] |= changed

    with pytest.raises(PackageError, match=said):
        desugar.load(rewrite(pack.path, pack.path.parent / "b.pt2", in_json(change)), native=False)
