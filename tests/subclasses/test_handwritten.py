"""Flattening and rebuilding values of handwritten classes: parts other than tensors, DTensors."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from desugar.ir.values import take_apart
from subclasses._torch import make_wrapper_subclass
from subclasses.handwritten import OpaqueContext, flatten_handwritten, is_dtensor, unflatten
from subclasses.layout import layout_of
from tests.desugar.judge import WAYS
from tests.subclasses.subjects import Pair, declare


class Mesh(OpaqueBase):
    """An opaque part of a value; PyTorch accepts such parts if their type is registered."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return type(other) is Mesh and other.name == self.name

    def __hash__(self):
        return hash(self.name)


register_opaque_type(Mesh, typ="reference", guard_fn=lambda mesh: [mesh.name])


class Meshed(Tensor):
    """One inner tensor, and where it lies."""

    @staticmethod
    def __new__(cls, local, mesh):
        out = make_wrapper_subclass(cls, local.shape, dtype=local.dtype, device=local.device)
        out.local, out.mesh = local, mesh
        return out

    def __tensor_flatten__(self):
        return ["local", "mesh"], ("meshed",)

    @staticmethod
    def __tensor_unflatten__(inners, context, size, stride):
        assert context == ("meshed",)
        return Meshed(inners["local"], inners["mesh"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        mesh = next(x.mesh for x in args if isinstance(x, cls))
        plain = [x.local if isinstance(x, cls) else x for x in args]
        return cls(func(*plain, **(kwargs or {})), mesh)


Holder = declare(name="Holder", keywords={"fallback": "map"})


def test_a_part_that_is_no_tensor_joins_the_context():
    x = Meshed(torch.ones(2), Mesh("a"))
    names, context = flatten_handwritten(x)
    assert names == ("local",) and context == OpaqueContext((("mesh", Mesh("a")),), ("meshed",))
    again = unflatten(Meshed, {"local": x.local}, context, x.size(), x.stride())
    assert again.local is x.local and again.mesh is x.mesh


def test_other_classes_keep_their_context():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.ones(2), torch.ones(2))
    assert flatten_handwritten(x) == (("a", "b"), None)
    y = unflatten(TwoTensor, {"a": x.a, "b": x.b}, None, x.size(), x.stride())
    assert type(y) is TwoTensor and y.a is x.a
    declared = Pair(torch.ones(2), torch.ones(2))
    assert take_apart(declared) == (declared._layout.present, declared._layout)


def test_layouts_of_two_meshes_differ():
    a, b, c = (Holder(Meshed(torch.ones(2), Mesh(name))) for name in "aba")
    assert layout_of(a.held) is layout_of(c.held) and a._layout is c._layout
    assert layout_of(a.held) is not layout_of(b.held) and a._layout is not b._layout


@pytest.mark.parametrize("way", WAYS)
def test_wrappers_with_opaque_parts_compile(way):
    compiled = WAYS[way](lambda x: (x.sin() * 2).cos())
    for name in ("a", "a", "b"):
        x = Meshed(torch.arange(3.0), Mesh(name))
        y = compiled(x)
        assert type(y) is Meshed and y.mesh == Mesh(name)
        torch.testing.assert_close(y.local, (x.local.sin() * 2).cos())


@pytest.mark.slow
def test_nothing_is_imported_to_tell_a_dtensor():
    assert not is_dtensor(torch.ones(1)) and not is_dtensor(None)
    code = "import sys, subclasses; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
