"""Files that were tampered with: an error that names the field, or the value that the file says, never another one."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import zipfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from subclasses import TensorSubclass, constant, inner, static
from subclasses.int8 import Int8Tensor, from_plain, to_plain
from subclasses.keyed import KeyedJaggedTensor
from subclasses.ragged import JaggedTensor, PaddedTensor
from subclasses.serialize import rebuild
from tests.subclasses.subjects import FACTORIES, Pair, assert_same, declare


def of_positive(cls, held, *, unit="m"):
    if held.numel() and bool((held <= 0).any()):
        raise ValueError("Positive.held: expected positive numbers")
    return super(Positive, cls).__new__(cls, held, unit=unit)


# Its constructor takes the fields by name, and reads their numbers.
Positive = declare(
    name="Positive",
    __module__=__name__,
    keywords={"fallback": "map"},
    held=inner(),
    unit=static(default="m"),
    __new__=of_positive,
)
# Its constructor takes something else than the fields.
Halved = declare(
    name="Halved",
    __module__=__name__,
    keywords={"fallback": "map"},
    part=inner(),
    __new__=lambda cls, whole: super(Halved, cls).__new__(cls, whole / 2),
)
# Its constructor takes the fields by name, and makes others of them.
Doubled = declare(
    name="Doubled",
    __module__=__name__,
    keywords={"fallback": "map"},
    held=inner(),
    __new__=lambda cls, held: super(Doubled, cls).__new__(cls, held * 2),
)


def jagged():
    return JaggedTensor(torch.randn(6, 2), torch.tensor([0, 2, 3, 6]))


OURS = {
    "jagged": jagged,
    "holes": lambda: JaggedTensor(torch.randn(6, 2), torch.tensor([0, 3, 6]), lengths=torch.tensor([1, 2])),
    "padded": lambda: PaddedTensor(torch.randn(3, 4), torch.tensor([4, 0, 2]), row_count=torch.tensor([3])),
    "keyed": lambda: KeyedJaggedTensor(
        ("a", "b"), torch.arange(6), torch.tensor([1, 2, 0, 3]), weights=torch.rand(6)
    ),
    "int8": lambda: Int8Tensor.from_float(torch.randn(4, 6), symmetric=False),
}
_, holes, padded, keyed, int8 = OURS.values()
OTHERS = {"positive": lambda: Positive(torch.rand(3) + 1), "halved": lambda: Halved(torch.ones(3))}
MADE = {**FACTORIES, **OURS, **OTHERS, "doubled": lambda: Doubled(torch.ones(3))}

# ---- writing files that say something else -----------------------------------------------------------------


def reduced(x):
    """The content of a file with a value: inner tensors, metadata, flags and attributes, to be changed."""
    _, (_, inners, metadata, flags, extras) = x.__reduce_ex__(2)
    return {"inners": inners, "metadata": metadata, "flags": flags, "extras": extras}


class _File:
    """An object that is written as a value of another class would be."""

    def __init__(self, cls, said, state=None):
        self.cls, self.said, self.state = cls, said, state

    def __reduce_ex__(self, protocol):
        made = (rebuild, (self.cls, *(self.said[k] for k in ("inners", "metadata", "flags", "extras"))))
        return made if self.state is None else (*made, self.state)


def by_torch(written, **kwargs):
    buffer = io.BytesIO()
    torch.save({"x": written}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **kwargs)["x"]


def by_pickle(written):
    return pickle.loads(pickle.dumps(written))


WAYS = {"torch.load": by_torch, "pickle.load": by_pickle}
way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def load(x, way=by_torch, **changed):
    """Loads a file of ``x`` with other entries in the given groups; ``...`` leaves an entry out."""
    said = reduced(x)
    for group, entries in changed.items():
        said[group] = {k: v for k, v in (said[group] | entries).items() if v is not ...}
    return way(_File(type(x), said))


# ---- values that the constructors refuse -------------------------------------------------------------------

LONG = torch.int64
REFUSED = {
    "offsets that describe no rows": (jagged, "inners", {"offsets": torch.tensor([5, 1, 9, -3])}, "offsets"),
    "offsets that decrease": (jagged, "inners", {"offsets": torch.tensor([0, 3, 2, 6])}, "offsets"),
    "offsets from below 0": (jagged, "inners", {"offsets": torch.tensor([-1, 2, 3, 6])}, "offsets"),
    "offsets beyond the values": (jagged, "inners", {"offsets": torch.tensor([0, 2, 3, 7])}, "offsets"),
    "offsets that leave out entries": (jagged, "inners", {"offsets": torch.tensor([0, 2, 3, 5])}, "offsets"),
    "offsets in two dimensions": (
        jagged,
        "inners",
        {"offsets": torch.zeros(2, 2, dtype=LONG)},
        "offsets",
    ),
    "offsets of no row": (jagged, "inners", {"offsets": torch.zeros(0, dtype=LONG)}, "offsets"),
    "offsets of int32": (jagged, "inners", {"offsets": torch.tensor([0, 2, 3, 6]).int()}, "offsets"),
    "offsets of floats": (jagged, "inners", {"offsets": torch.tensor([0.0, 2, 3, 6])}, "offsets"),
    "offsets in a wrapper": (
        jagged,
        "inners",
        {"offsets": Pair(torch.tensor([0, 9, 3, 6]), torch.tensor([0, 9, 3, 6]))},
        "offsets",
    ),
    "no offsets": (jagged, "inners", {"offsets": ...}, "offsets"),
    "a list as offsets": (jagged, "inners", {"offsets": [0, 2, 3, 6]}, "offsets"),
    "lengths beyond the offsets": (holes, "inners", {"lengths": torch.tensor([4, 2])}, "lengths"),
    "lengths below 0": (holes, "inners", {"lengths": torch.tensor([-1, 2])}, "lengths"),
    "too many lengths": (holes, "inners", {"lengths": torch.tensor([1, 2, 0])}, "lengths"),
    "a scalar of values": (jagged, "inners", {"values": torch.tensor(1.0)}, "values"),
    "a bound that is too great": (jagged, "metadata", {"max_length": 99_999_999}, "max_length"),
    "a bound that is too small": (jagged, "metadata", {"max_length": 2}, "max_length"),
    "a bound below 0": (jagged, "metadata", {"max_length": -1}, "max_length"),
    "a float as bound": (jagged, "metadata", {"max_length": 3.0}, "max_length"),
    "a bool as bound": (jagged, "metadata", {"max_length": True}, "max_length"),
    "no bound": (jagged, "metadata", {"max_length": ...}, "max_length"),
    "another ragged dim": (jagged, "metadata", {"ragged_dim": 3}, "ragged_dim"),
    "a bool as ragged dim": (jagged, "metadata", {"ragged_dim": True}, "ragged_dim"),
    "padded lengths below 0": (padded, "inners", {"lengths": torch.tensor([4, -1, 2])}, "lengths"),
    "too few padded lengths": (padded, "inners", {"lengths": torch.tensor([4, 2])}, "lengths"),
    "padded lengths of int32": (padded, "inners", {"lengths": torch.tensor([4, 0, 2]).int()}, "lengths"),
    "more rows than the table has": (padded, "inners", {"row_count": torch.tensor([4])}, "row_count"),
    "two numbers of rows": (padded, "inners", {"row_count": torch.tensor([3, 3])}, "row_count"),
    "a ragged dim of no table": (padded, "metadata", {"ragged_dim": 2}, "ragged_dim"),
    "a ragged dim from behind": (padded, "metadata", {"ragged_dim": -1}, "ragged_dim"),
    "a string as ragged dim": (padded, "metadata", {"ragged_dim": "1"}, "ragged_dim"),
    "merged rows that do not divide": (padded, "metadata", {"ragged_dim": 1, "batch_dim": 1}, "lengths"),
    "keyed offsets that decrease": (
        keyed,
        "inners",
        {"offsets": torch.tensor([[0, 1, 3], [3, 2, 6]])},
        "offsets",
    ),
    "keyed offsets beyond the values": (
        keyed,
        "inners",
        {"offsets": torch.tensor([[0, 1, 3], [3, 3, 7]])},
        "offsets",
    ),
    "keyed offsets of one dimension": (keyed, "inners", {"offsets": torch.tensor([0, 1, 3])}, "offsets"),
    "keyed bound": (keyed, "metadata", {"max_length": 99_999_999}, "max_length"),
    "a key twice": (keyed, "metadata", {"keys": ("a", "a")}, "keys"),
    "keys that are no strings": (keyed, "metadata", {"keys": (1, 2)}, "keys"),
    "more keys than offsets": (keyed, "metadata", {"keys": ("a", "b", "c")}, "offsets"),
    "a list of keys": (keyed, "metadata", {"keys": ["a", "b"]}, "keys"),
    "too few weights": (keyed, "inners", {"weights": torch.rand(5)}, "weights"),
    "weights that are ints": (keyed, "inners", {"weights": torch.ones(6, dtype=LONG)}, "weights"),
    "scales of no blocks": (int8, "inners", {"scale": torch.rand(3, 1)}, "scale"),
    "scales of other dimensions": (int8, "inners", {"scale": torch.rand(1)}, "scale"),
    "scales that are ints": (int8, "inners", {"scale": torch.ones(4, 1, dtype=LONG)}, "scale"),
    "floats as numbers": (int8, "inners", {"qdata": torch.randn(4, 6)}, "qdata"),
    "zero points of another size": (
        int8,
        "inners",
        {"zero_point": torch.zeros(1, 1, dtype=torch.int8)},
        "zero_point",
    ),
    "an outer dtype of ints": (int8, "metadata", {"float_dtype": torch.int32}, "float_dtype"),
    "an outer dtype that is none": (int8, "metadata", {"float_dtype": "float32"}, "float_dtype"),
    "an unknown activation": (int8, "metadata", {"activation": "column"}, "activation"),
    "no bool": (int8, "metadata", {"partial": 1}, "partial"),
    "what the class's own constructor reads": (
        OTHERS["positive"],
        "inners",
        {"held": -torch.ones(3)},
        "Positive.held",
    ),
    "an inner tensor of no field": (FACTORIES["optional, there"], "inners", {"extr": torch.ones(3)}, "extr"),
    "metadata of no field": (FACTORIES["tagged"], "metadata", {"colour": 1}, "colour"),
    "an inner tensor as metadata": (FACTORIES["tagged"], "metadata", {"held": torch.ones(3)}, "held"),
}


@pytest.mark.sweep(2)
@way
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_constructor_refuses(case, way):
    factory, group, changed, field = REFUSED[case]
    x = factory()
    assert_same(load(x, way), x)
    with pytest.raises((ValueError, TypeError), match=field):
        load(x, way, **{group: changed})


BOUNDED = {
    "jagged": lambda x, bound: JaggedTensor(x.values, x.offsets, max_length=bound),
    "keyed": lambda x, bound: KeyedJaggedTensor(x.keys, x.values, x.lengths, max_length=bound),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_bound_that_a_constructor_refuses_too(kind):
    make, x = BOUNDED[kind], OURS[kind]()
    wide = make(x, 5000)
    assert_same(by_torch(wide), wide)
    words = r"max_length: expected from 0.* to 1048576 for 6 entries, got 99999999"
    with pytest.raises(ValueError, match=words):
        make(x, 99_999_999)


# ---- attributes, flags, classes ----------------------------------------------------------------------------

HELD_BY_CLASSES = [
    "_layout",
    "_raw_values",
    "values",
    "offsets",
    "max_length",
    "ragged_dim",
    "_max_length_carrier",
    "_gradient_hooks",
    "to_dense",
    "materialize",
    "unwrap",
    "shape",
    "check_loaded",
    "sum",
    "_new",
    "__class__",
    "__dict__",
    "__tensor_flatten__",
    "__anything__",
    "_dynamo_dynamic_indices",
]


# Plain data in the class body, which a value may have otherwise, beside what it may not.
Counted = declare(
    name="Counted",
    __module__=__name__,
    count=0,
    _hidden=0,
    levels=constant([1.0]),
    kind=dict,
    width=property(lambda self: 1),
    keywords={"fallback": "map"},
)


def counted():
    return Counted(torch.ones(1))


FLAGS = {
    "no bool": {"requires_grad": 1},
    "missing": {"cotangent": ...},
    "unknown": {"inference": True},
    "dims of no tensor": {"dynamic_dims": {"offset": [0]}},
    "dims beyond": {"dynamic_dims": {"offsets": [1]}},
    "dims of the value beyond": {"dynamic_dims": {"": [3]}},
    "dims below 0": {"dynamic_dims": {"values": [-1]}},
    "dims that are no list": {"dynamic_dims": {"values": 0}},
    "dims by no name": {"dynamic_dims": [0]},
}


def with_state(x, way):
    return way(_File(type(x), reduced(x), state={"_layout": None}))


# A file that says something else: how it is loaded, and words of the error.
TAMPERED = {
    **{
        f"the attribute {name} of a class": (
            lambda way, name=name: load(jagged(), way, extras={name: "replaced"}),
            rf"JaggedTensor\.{name}",
        )
        for name in HELD_BY_CLASSES
    },
    **{
        f"the attribute {name} of a class body": (
            lambda way, name=name: load(counted(), way, extras={name: 3}),
            rf"Counted\.{name}",
        )
        for name in ("_hidden", "levels", "kind", "width")
    },
    **{
        f"the mark {mark} that is no bool": (
            lambda way, mark=mark: load(FACTORIES["pair"](), way, extras={mark: "yes"}),
            rf"Pair\.{mark}: expected a bool",
        )
        for mark in ("_is_param", "_of_parameter")
    },
    **{
        f"flags: {case}": (lambda way, flags=flags: load(jagged(), way, flags=flags), "JaggedTensor")
        for case, flags in FLAGS.items()
    },
    **{
        f"{given!r} as {group}": (
            lambda way, group=group, given=given: way(
                _File(JaggedTensor, reduced(jagged()) | {group: given})
            ),
            r"JaggedTensor: expected the .* of a file by name",
        )
        for group in ("inners", "metadata", "flags", "extras")
        for given in (None, [], "x", 3, {1: 2})
    },
    **{
        f"{cls!r} as a class": (
            lambda way, cls=cls: way(_File(cls, reduced(jagged()))),
            "expected a class declared with TensorSubclass",
        )
        for cls in [Tensor, nn.Parameter, dict, TensorSubclass, 3]
    },
    # The opcode that sets the state of an object would write to its attributes, past every check.
    **{
        f"a state after the making of {kind}": (
            lambda way, make=make: with_state(make(), way),
            rf"{type(make()).__name__}.__setstate__",
        )
        for kind, make in OURS.items()
    },
}


@way
@pytest.mark.parametrize("case", TAMPERED)
def test_what_no_file_may_say(case, way):
    torch.serialization.add_safe_globals([dict, TensorSubclass])
    load_it, words = TAMPERED[case]
    with pytest.raises((TypeError, ValueError), match=words):
        load_it(way)


def test_an_attribute_that_would_not_load_is_not_written():
    x = jagged()
    x.to_dense = None
    with pytest.raises(ValueError, match=r"JaggedTensor\.to_dense: is set on a value"):
        pickle.dumps(x)


@way
def test_attributes_of_a_user(way):
    assert load(jagged(), way, extras={"note": ["any", 1]}).note == ["any", 1]
    assert load(counted(), way, extras={"count": 3}).count == 3


# ---- any field, any entry ----------------------------------------------------------------------------------

HOSTILE = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    99_999_999,
    2**70,
    float("nan"),
    "row",
    b"row",
    (),
    (1, "a"),
    [],
    {},
    torch.float32,
    torch.int8,
    torch.tensor(2.0),
    torch.zeros(0),
    torch.ones(4, 1),
    torch.tensor([3, 1, 2]),
    torch.tensor([0, 2, 3, 6]),
    torch.tensor([0, 0, 6, 6]),
    torch.tensor([[0, 1, 3], [3, 3, 6]]),
    torch.ones(6, 2, dtype=torch.complex64),
    torch.ones(4, 6, dtype=torch.int8),
    torch.ones(2, 3, device="meta"),
    torch.ones(2, 2).to_sparse(),
]


def made_again(x, said):
    """The value that the constructor makes of a file's content, if it takes all of it."""
    given = said["inners"] | said["metadata"]
    if isinstance(x, KeyedJaggedTensor):
        lengths = given.pop("offsets").diff(dim=1).flatten()
        return KeyedJaggedTensor(given.pop("keys"), given.pop("values"), lengths, **given)
    return type(x)(**given)


def changes(x):
    """Every entry that a file has, or could have, with everything that could be written there instead."""
    said = reduced(x)
    said["inners"] = dict.fromkeys(type(x).__spec__.inner_names) | said["inners"]
    for group, name in ((g, n) for g in ("inners", "metadata") for n in said[g]):
        for hostile in [*HOSTILE, ...]:
            yield group, name, hostile
        held = said[group][name]
        if isinstance(held, Tensor):
            chance = random.Random(0)
            for _ in range(8):
                other = held.clone()
                if other.numel():
                    other.view(-1)[chance.randrange(other.numel())] += chance.choice([-7, -1, 1, 7])
                yield group, name, other
            yield group, name, held[..., :-1]
            yield group, name, held.unsqueeze(0)
            yield group, name, held.to(torch.int32)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("kind", OURS)
def test_any_entry_changed_is_refused_or_makes_what_the_constructor_makes(kind):
    x = OURS[kind]()
    outcomes = {"refused": 0, "made": 0}
    for group, name, hostile in changes(x):
        said = reduced(x)
        said[group] = {k: v for k, v in (said[group] | {name: hostile}).items() if v is not ...}
        try:
            y = by_pickle(_File(type(x), copy.deepcopy(said)))
        except (TypeError, ValueError, RuntimeError, KeyError):
            outcomes["refused"] += 1
            continue
        outcomes["made"] += 1
        if y.is_meta or (kind == "keyed" and not _is_packed(y)) or (kind == "padded" and y.merged):
            continue
        again = made_again(x, said)
        if kind == "int8":
            assert torch.equal(y.dequantize(), again.dequantize())
        else:
            assert_same(y, again)
    assert min(outcomes.values()) > 5, outcomes


def _is_packed(x):
    return torch.equal(x.offsets, KeyedJaggedTensor(x.keys, x.values, x.lengths, max_length=9).offsets)


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    buffer.seek(0)
    return buffer


@pytest.mark.slow
def test_bytes_of_a_checkpoint_changed():
    """Each byte of a file's pickle, one at a time: an error, or a value that its own constructor accepts."""
    x, buffer = jagged(), io.BytesIO()
    torch.save(x, buffer)
    with zipfile.ZipFile(buffer) as file:
        members = {name: file.read(name) for name in file.namelist()}
    pickled = next(name for name in members if name.endswith("/data.pkl"))
    chance = random.Random(1)
    loaded = 0
    for at in range(len(members[pickled])):
        text = bytearray(members[pickled])
        text[at] ^= 1 << chance.randrange(8)
        try:
            y = torch.load(zipped(members | {pickled: bytes(text)}), weights_only=True)
        except Exception:  # torch decides which error a damaged pickle raises  # noqa: BLE001
            continue
        if type(y) is JaggedTensor:
            loaded += 1
            parts = {"lengths": y.lengths, "ragged_dim": y.ragged_dim}
            assert JaggedTensor(y.values, y.offsets, **parts).max_length <= y.max_length
            assert not any(hasattr(JaggedTensor, name) for name in set(y.__dict__) - {*x.__dict__})
    assert loaded


# ---- files that still load ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
def test_without_data(kind, tmp_path):
    x = MADE[kind]()
    torch.save({"x": x}, tmp_path / "x.pt")
    mapped = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)["x"]
    assert_same(mapped, x)
    meta = torch.load(tmp_path / "x.pt", weights_only=True, map_location="meta")["x"]
    assert meta.is_meta and meta.shape == x.shape and meta._layout is x._layout
    with FakeTensorMode():
        fake = torch.load(tmp_path / "x.pt", weights_only=True)["x"]
    assert fake.shape == x.shape and fake._layout is x._layout


@way
def test_constructors_that_take_something_else_than_the_fields(way):
    for x in (Halved(torch.ones(3)), Doubled(torch.ones(3))):
        assert_same(way(x), x)


def test_values_that_ops_made():
    """Slices, merged dimensions, holes, transposed rows, selected keys, gradients."""
    x, p, k, w = jagged(), padded(), keyed(), int8()
    made = [
        *(x[1:], x[:0], x.flatten(0, 1), x.transpose(1, 2), x.to_padded(), holes() * 2, x.sum(-1)),
        *(p[:, :2], p[1:], p.transpose(0, 1), p.to_jagged(), PaddedTensor.merge(x.to_padded())),
        *(k.permute(["b"]), *k.split([1, 1]), k["b"], k.compact()),
        *(w[1:3], w.t(), w[:, :3], w.view(2, 2, 6)),
    ]
    y = jagged().requires_grad_()
    (y * 2).to_dense().sum().backward()
    for value in [*made, y, y.grad]:
        assert_same(by_torch(value), value)


def test_the_parts_of_a_batch_that_share_their_offsets_still_do():
    x = jagged()
    one, two = by_torch([x, x.with_values(torch.ones(6, 2))])
    assert one.offsets is two.offsets


# ---- other formats -----------------------------------------------------------------------------------------

PLAIN = {
    "an unknown dtype": ({"float_dtype": {"dtype": "Tensor"}}, "float_dtype"),
    "a dtype of ints": ({"float_dtype": {"dtype": "int32"}}, "float_dtype"),
    "no dtype": ({"float_dtype": ["float32"]}, "float_dtype"),
    "an unknown argument": ({"block_size": {"tuple": [1, 6]}}, "block_size"),
    "no bool": ({"partial": "no"}, "partial"),
    "another activation": ({"activation": {"tuple": ["row"]}}, "activation"),
}


def described(changed=(), **others):
    """The text beside safetensors, of which some entries are changed."""
    text = json.loads(to_plain({"w": int8()})[1]["declared_values"])["w"]
    return json.dumps({"w": text | {"metadata": text["metadata"] | dict(changed)} | others})


BESIDE_SAFETENSORS = {
    **{case: ({"declared_values": described(changed)}, field) for case, (changed, field) in PLAIN.items()},
    **{
        f"the text {text!r}": ({"declared_values": text}, "from_plain")
        for text in ["", "{", "[]", '{"w": 3}', '{"w": {}}', described(nested=[]), described(more=1)]
    },
    **{
        f"the class {name}": (
            {"declared_values": described(**{"class": name})},
            "is not declared in this process",
        )
        for name in ("os.system", "subclasses.int8.tensor.Int8Tensor.Cotangent", None)
    },
    "a plain tensor that is described": (
        {"declared_values": described().replace('"w"', '"b"')},
        "plain tensor",
    ),
    "a tied name that replaces a tensor": ({"tied_tensors": '{"b": "v"}'}, r"from_plain: .*'b'"),
}


@pytest.mark.parametrize("case", BESIDE_SAFETENSORS)
def test_descriptions_beside_safetensors(case):
    changed, words = BESIDE_SAFETENSORS[case]
    tensors, metadata = to_plain({"w": int8(), "b": torch.ones(2), "v": torch.zeros(2)})
    with pytest.raises((TypeError, ValueError), match=words):
        from_plain(tensors, metadata | changed)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint(tmp_path, monkeypatch):
    x = jagged()
    dcp.state_dict_saver.save({"x": x}, checkpoint_id=tmp_path / "good", no_dist=True)
    into = {"x": x.with_values(torch.zeros(6, 2))}
    dcp.state_dict_loader.load(into, checkpoint_id=tmp_path / "good", no_dist=True)
    assert_same(into["x"], x)
    plain: Any = type(x).__reduce_ex__

    def tampered(self, protocol):
        function, (cls, inners, *rest) = plain(self, protocol)
        return function, (cls, inners | {"offsets": torch.tensor([5, 1, 9, -3])}, *rest)

    monkeypatch.setattr(JaggedTensor, "__reduce_ex__", tampered)
    dcp.state_dict_saver.save({"x": x}, checkpoint_id=tmp_path / "bad", no_dist=True)
    monkeypatch.undo()
    with pytest.raises(dcp.api.CheckpointException, match="offsets"):
        dcp.state_dict_loader.load(into, checkpoint_id=tmp_path / "bad", no_dist=True)
