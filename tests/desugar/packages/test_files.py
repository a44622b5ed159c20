"""The file of a package: what is refused, and that no change of a byte gives another result."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn

import desugar
from desugar import PackageError, SignatureError
from desugar.packages import archive
from desugar.packages.loading import recompile
from desugar.packages.manifest import machine
from desugar.packages.manifest.records import Machine
from tests.desugar.packages.test_inference import Block, rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A package of rows: its file, the model, and what the manifest says."""
    place, model = tmp_path_factory.mktemp("packages") / "rows.pt2", Block()
    torch.compiler.reset()
    digest = desugar.save(place, model, desugar.call(rows(3, 5, 2)), native=False)
    return place, model, digest


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    monkeypatch.setattr(recompile, "BACKEND", "eager")


def rewrite(place, target, change, *, is_signed):
    """Copies a package with a changed manifest; `is_signed` makes its digest that of the change."""
    reader = torch._C.PyTorchFileReader(str(place))
    names = [n for n in reader.get_all_records() if n.startswith(("extra/", "data/"))]
    entries = {name: reader.get_record(name) for name in names}
    entries[archive.MANIFEST] = change(entries[archive.MANIFEST])
    if is_signed:
        digests = json.loads(entries[archive.DIGESTS])
        digests[archive.MANIFEST] = hashlib.sha256(entries[archive.MANIFEST]).hexdigest()
        entries[archive.DIGESTS] = json.dumps(digests).encode()
    writer = torch._C.PyTorchFileWriter(str(target))
    for name, content in entries.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()


def change_manifest(place, target, change):
    def changed(content):
        data = json.loads(content)
        change(data["manifest"])
        return json.dumps(data).encode()

    rewrite(place, target, changed, is_signed=True)
    return target


# ------------------------------------------------------------------------------------------------- what is refused


def test_files_that_are_no_packages(tmp_path, saved):
    place, _, _ = saved
    with pytest.raises(FileNotFoundError, match="there is no file"):
        desugar.load(tmp_path / "none.pt2")
    text = tmp_path / "text.pt2"
    text.write_text("no archive")
    with pytest.raises(PackageError, match="is no package that can be read"):
        desugar.load(text)
    other = tmp_path / "other.pt2"
    torch.save({"x": torch.ones(2)}, other)
    with pytest.raises(PackageError, match=r"is an archive, and no package of desugar\.save"):
        desugar.load(other)
    half = tmp_path / "half.pt2"
    half.write_bytes(place.read_bytes()[: place.stat().st_size // 2])
    with pytest.raises(PackageError, match="is no package that can be read"):
        desugar.load(half)


def test_the_digest_of_the_file(saved):
    place, _, digest = saved
    assert digest == hashlib.sha256(place.read_bytes()).hexdigest()
    desugar.load(place, sha256=digest, native=False)
    desugar.load(place, sha256=digest.upper(), native=False)
    with pytest.raises(PackageError, match="expected a file with the sha256 0000"):
        desugar.load(place, sha256="0" * 64, native=False)


def test_another_release(saved, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(PackageError, match=r"was saved with torch .*, and this is 1\.0: save it again"):
        desugar.load(saved[0], native=False)


def test_no_machine_code(saved):
    with pytest.raises(PackageError, match="holds no machine code: load it with native=False"):
        desugar.load(saved[0])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"system": "Plan 9"}, "saved on Plan 9, and this is"),
        ({"processor": "ZVECTOR"}, "ZVECTOR kernels"),
        ({"instructions": frozenset({"avx1024"})}, "avx1024, which this one lacks"),
    ],
)
def test_another_processor(changed, said):
    here = machine.this_machine()
    fields = {name: getattr(here, name) for name in ("system", "processor", "instructions")}
    machine.check_machine(here)
    with pytest.raises(PackageError, match=said):
        machine.check_machine(Machine(**fields | changed))


def test_one_that_exists_is_replaced_whole_or_not_at_all(tmp_path, saved):
    place = tmp_path / "package.pt2"
    shutil.copy(saved[0], place)
    before = place.read_bytes()
    with pytest.raises(PackageError):
        desugar.save(place, lambda x: 3, desugar.call(torch.ones(2)), native=False)
    assert place.read_bytes() == before and list(tmp_path.iterdir()) == [place]


# ------------------------------------------------------------------------------------------------- damage


def same_or_error(place, model):
    """Loads and calls a package: an error of it, or the right result."""
    x = rows(1, 4)
    try:
        got = desugar.load(place, native=False)(x)
    except (PackageError, SignatureError):
        return "refused"
    with torch.no_grad():
        torch.testing.assert_close(got.values, model(x).values)
    return "right"


@settings(max_examples=60)
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_every_byte_of_a_manifest(saved, tmp_path_factory, position, byte):
    """No changed byte of a manifest gives another result, with the digest that it had."""
    place, model, _ = saved
    target = tmp_path_factory.mktemp("damaged") / "rows.pt2"

    def change(content):
        at = position % len(content)
        return content[:at] + bytes([byte]) + content[at + 1 :]

    rewrite(place, target, change, is_signed=False)
    same_or_error(target, model)


@settings(max_examples=60)
@given(position=st.integers(0, 10**6), byte=st.integers(32, 126))
@example(999999, 48)  # the number of an input, when the manifest had this length
def test_a_manifest_that_somebody_signed_anew(saved, tmp_path_factory, position, byte):
    """A changed manifest with a digest that fits: an error of the package, or a call that ends; never code."""
    place, _, _ = saved
    target = tmp_path_factory.mktemp("signed") / "rows.pt2"

    def change(content):
        at = position % len(content)
        return content[:at] + bytes([byte]) + content[at + 1 :]

    rewrite(place, target, change, is_signed=True)
    try:
        desugar.load(target, native=False)(rows(1, 4))
    except (PackageError, SignatureError):
        return
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return  # what a valid manifest of another program does to this graph


@pytest.mark.parametrize(
    "name", ["__class__", "x; import os", "__dict__", "a.b", "values()", "", "_layout = 3 #", "é x"]
)
def test_names_become_no_text(saved, tmp_path, name):
    """Names of a manifest stand in generated text only if they are names of inner tensors or parameters."""
    place, target = saved[0], tmp_path / "named.pt2"

    def rename_inner(manifest):
        manifest["programs"][0]["leaves"][0]["inner"][0][0] = name

    def rename_parameter(manifest):
        manifest["programs"][0]["parameters"][0]["name"] = name
        manifest["programs"][0]["arguments"][0][0] = name

    def rename_path(manifest):
        manifest["programs"][0]["origins"][0]["path"] = [name]

    def rename_method(manifest):
        manifest["programs"][0]["origins"][0]["method"] = name or "sizes"

    for change in (rename_inner, rename_path, rename_method):
        with pytest.raises(PackageError):
            desugar.load(change_manifest(place, target, change), native=False)
    if name in ("__class__", "__dict__"):  # valid names of a parameter
        desugar.load(change_manifest(place, target, rename_parameter), native=False)
    else:
        with pytest.raises(PackageError):
            desugar.load(change_manifest(place, target, rename_parameter), native=False)


def test_a_keyword_of_python_is_no_parameter(saved, tmp_path):
    def rename(manifest):
        manifest["programs"][0]["parameters"][0]["name"] = "lambda"
        manifest["programs"][0]["arguments"][0][0] = "lambda"

    with pytest.raises(PackageError, match="lambda"):
        desugar.load(change_manifest(saved[0], tmp_path / "keyword.pt2", rename), native=False)


def test_weights_of_a_file_are_what_the_class_takes(tmp_path):
    """The same checks as for a checkpoint: a scale that is missing a row is refused with the field's name."""
    from subclasses.int8 import Int8WeightOnlyConfig, quantize_

    model = Block(32)
    quantize_(model, Int8WeightOnlyConfig())
    place = tmp_path / "int8.pt2"
    desugar.save(place, model, desugar.call(torch.randn(4, 32)), native=False)

    def shorten(manifest):
        weight = next(w for w in manifest["weights"] if w["name"] == "first.weight")
        scale = dict(weight["leaf"]["inner"])["scale"]["facts"]
        scale["size"][0] -= 1

    with pytest.raises(PackageError):
        desugar.load(change_manifest(place, tmp_path / "short.pt2", shorten), native=False)


def test_ops_that_a_graph_may_not_call(saved, tmp_path):
    place, target = saved[0], tmp_path / "ops.pt2"
    reader = torch._C.PyTorchFileReader(str(place))
    graphs = json.loads(reader.get_record(archive.GRAPHS))
    call = next(entry for entry in graphs["forward0"] if entry[0] == "call")
    for name in ("aten.from_file.default", "os.system", "aten.__class__.default", "python.eval", "prims.x"):
        changed = copy.deepcopy(graphs)
        changed["forward0"][graphs["forward0"].index(call)][1] = name
        content = json.dumps(changed).encode()
        digests = json.loads(reader.get_record(archive.DIGESTS))
        digests[archive.GRAPHS] = hashlib.sha256(content).hexdigest()
        writer = torch._C.PyTorchFileWriter(str(target))
        for entry in reader.get_all_records():
            if entry.startswith(("extra/", "data/")):
                new = {archive.GRAPHS: content, archive.DIGESTS: json.dumps(digests).encode()}
                data = new.get(entry, reader.get_record(entry))
                writer.write_record(entry, data, len(data))
        writer.write_end_of_file()
        with pytest.raises(PackageError):
            desugar.load(target, native=False)


def test_loading_unpickles_nothing(saved, monkeypatch):
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    desugar.load(saved[0], native=False)


def test_errors_can_be_pickled():
    import pickle

    error = pickle.loads(pickle.dumps(SignatureError("x", "4", "5")))
    assert (error.argument, error.expected, error.got, str(error)) == ("x", "4", "5", "x: expected 4, got 5")


def test_a_weight_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PackageError, match="meta"):
        desugar.save(tmp_path / "a.pt2", model, desugar.call(torch.randn(1, 2, device="meta")), native=False)
