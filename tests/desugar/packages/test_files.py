"""The file of a package: loading refuses damaged files, no changed byte changes a result; the `package` command."""

import contextlib
import hashlib
import json
import pickle
import shutil

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import desugar
from desugar import PackageError, SignatureError
from desugar.cli.commands import app
from desugar.packages import archive
from desugar.packages.loading import recompile
from desugar.packages.manifest import needs
from desugar.packages.manifest.records import Machine
from tests.desugar.packages.test_inference import Block, int8_block, rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A package of rows: its file, the model, and its manifest."""
    place, model = tmp_path_factory.mktemp("packages") / "rows.pt2", Block()
    torch.compiler.reset()
    return place, model, desugar.save(place, model, desugar.call(rows(3, 5, 2)), native=False)


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    monkeypatch.setattr(recompile, "BACKEND", "eager")


def rewrite(place, target, change, *, entry=archive.MANIFEST):
    """Copies a package with one entry changed, and the CRC-32 of the change."""
    reader = torch._C.PyTorchFileReader(str(place))
    names = [n for n in reader.get_all_records() if n.startswith(("extra/", "data/"))]
    entries = {name: reader.get_record(name) for name in names}
    entries[entry] = change(entries[entry])
    writer = torch._C.PyTorchFileWriter(str(target))
    for name, content in entries.items():
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    return target


def in_json(change):
    """Returns a change of the text for a change of its data."""

    def changed(content):
        data = json.loads(content)
        change(data)
        return json.dumps(data).encode()

    return changed


def assert_refused(place, said=None):
    with pytest.raises(PackageError, match=said):
        desugar.load(place, native=False)


# --------------------------------------------------------------------------------------------------- refused files


NO_PACKAGES = {
    "text": (lambda _, path: path.write_text("no archive"), "is not a package that can be read"),
    "another archive": (
        lambda _, path: torch.save({"x": torch.ones(2)}, path),
        r"is an archive, and no package of desugar\.save",
    ),
    "half of a package": (
        lambda package, path: path.write_bytes(package.read_bytes()[: package.stat().st_size // 2]),
        "is not a package that can be read",
    ),
}


@pytest.mark.parametrize("name", NO_PACKAGES)
def test_files_that_are_no_packages(tmp_path, saved, name):
    write, said = NO_PACKAGES[name]
    with pytest.raises(FileNotFoundError, match="there is no file"):
        desugar.load(tmp_path / "package.pt2")
    write(saved[0], tmp_path / "package.pt2")
    assert_refused(tmp_path / "package.pt2", said)


def test_the_digest_of_the_file(saved):
    place, _, digest = saved
    assert digest == hashlib.sha256(place.read_bytes()).hexdigest()
    desugar.load(place, sha256=digest, native=False)
    desugar.load(place, sha256=digest.upper(), native=False)
    with pytest.raises(PackageError, match="expected a file with the sha256 0000"):
        desugar.load(place, sha256="0" * 64, native=False)


def test_another_release(saved, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert_refused(saved[0], r"was saved with torch .*, and this is 1\.0: save it again")


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
    here = needs.this_machine()
    fields = {name: getattr(here, name) for name in ("system", "processor", "instructions")}
    needs.check_machine(here)
    with pytest.raises(PackageError, match=said):
        needs.check_machine(Machine(**fields | changed))


def test_one_that_exists_is_replaced_whole_or_not_at_all(tmp_path, saved):
    place = tmp_path / "package.pt2"
    shutil.copy(saved[0], place)
    before = place.read_bytes()
    with pytest.raises(PackageError):
        desugar.save(place, lambda x: 3, desugar.call(torch.ones(2)), native=False)
    assert place.read_bytes() == before and list(tmp_path.iterdir()) == [place]
    loaded = archive.Archive(place)
    desugar.save(place, lambda x: x.exp() + 1, desugar.call(torch.ones(2)), native=False)
    with pytest.raises(PackageError, match="was replaced since it was loaded"):
        loaded.check_library("forward0")


# ------------------------------------------------------------------------------------------------- damage


def replaced(position, byte):
    """Returns a change of one byte."""

    def change(content):
        at = position % len(content)
        return content[:at] + bytes([byte]) + content[at + 1 :]

    return change


@settings(max_examples=60)
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_every_byte_of_a_manifest(saved, tmp_path_factory, position, byte):
    """No changed byte of a manifest gives another result, with the CRC-32 that it had."""
    place, model, _ = saved
    target = tmp_path_factory.mktemp("damaged") / "rows.pt2"
    whole, manifest = place.read_bytes(), torch._C.PyTorchFileReader(str(place)).get_record(archive.MANIFEST)
    changed = replaced(position, byte)(manifest)
    target.write_bytes(whole.replace(manifest, changed))
    if changed != manifest:
        return assert_refused(target, "damaged")
    x = rows(1, 4)
    with torch.no_grad():
        torch.testing.assert_close(desugar.load(target, native=False)(x).values, model(x).values)


@pytest.mark.parametrize("entry", [archive.GRAPHS, "data/desugar/weights/0"])
def test_damaged_entries(saved, tmp_path, entry):
    content = torch._C.PyTorchFileReader(str(saved[0])).get_record(entry)
    target = tmp_path / "rows.pt2"
    target.write_bytes(saved[0].read_bytes().replace(content, replaced(7, content[7] ^ 1)(content)))
    assert_refused(target, f"{entry} is damaged")


@settings(max_examples=60)
@given(position=st.integers(0, 10**6), byte=st.integers(32, 126))
@example(999999, 48)  # the number of an input, when the manifest had this length
def test_a_manifest_that_somebody_signed_anew(saved, tmp_path_factory, position, byte):
    """A changed manifest with a digest that fits: an error of the package, or a call that ends; never code."""
    target = rewrite(saved[0], tmp_path_factory.mktemp("signed") / "rows.pt2", replaced(position, byte))
    # A package raises its own errors; a valid manifest of another program raises that program's errors.
    with contextlib.suppress(PackageError, RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        desugar.load(target, native=False)(rows(1, 4))


def test_a_tensor_has_a_stride_for_each_dimension(saved, tmp_path):
    """The check in C++ would read a second one behind the end of the first."""
    change = in_json(lambda data: data["manifest"]["programs"][0]["leaf_facts"][0]["stride"].pop())
    assert_refused(
        rewrite(saved[0], tmp_path / "strides.pt2", change), "a tensor of 2 dimensions has 1 strides"
    )


def rename_inner(manifest, name):
    manifest["programs"][0]["leaves"][0]["inner"][0][0] = name


def rename_parameter(manifest, name):
    manifest["parameters"][0]["name"] = manifest["programs"][0]["arguments"][0][0] = name


def symbol_of(manifest):
    return next(o for o in manifest["programs"][0]["spec"]["inputs"]["origins"] if o["method"] is not None)


def rename_path(manifest, name):
    symbol_of(manifest)["path"] = [name]


def rename_method(manifest, name):
    symbol_of(manifest)["method"] = name or "sizes"


NO_NAMES = ["__class__", "x; import os", "__dict__", "a.b", "values()", "", "_layout = 3 #", "é x", "lambda"]


@pytest.mark.parametrize("rename", [rename_inner, rename_path, rename_method, rename_parameter])
@pytest.mark.parametrize("name", NO_NAMES)
def test_names_become_no_text(saved, tmp_path, name, rename):
    """Generated text contains a name of the manifest only if it names an inner tensor or a parameter."""
    target = rewrite(saved[0], tmp_path / "named.pt2", in_json(lambda data: rename(data["manifest"], name)))
    if rename is rename_parameter and name in ("__class__", "__dict__"):  # valid names of a parameter
        desugar.load(target, native=False)
    else:
        assert_refused(target, "lambda" if rename is rename_parameter and name == "lambda" else None)


def test_weights_of_a_file_are_what_the_class_takes(tmp_path):
    """The same checks as for a checkpoint: a scale that is missing a row is refused with the field's name."""
    place = tmp_path / "int8.pt2"
    desugar.save(place, int8_block(), desugar.call(torch.randn(4, 32)), native=False)

    def shorten(data):
        weight = next(w for w in data["manifest"]["weights"] if w["name"] == "first.weight")
        weight["facts"][dict(weight["value"]["inner"])["scale"]["index"]]["size"][0] -= 1

    assert_refused(rewrite(place, tmp_path / "short.pt2", in_json(shorten)))


@pytest.mark.parametrize(
    "name", ["aten.from_file.default", "os.system", "aten.__class__.default", "python.eval", "prims.x"]
)
def test_ops_that_a_graph_may_not_call(saved, tmp_path, name):
    def rename(graphs):
        next(entry for entry in graphs["forward0"] if entry[0] not in ("placeholder", "output"))[0] = name

    assert_refused(rewrite(saved[0], tmp_path / "ops.pt2", in_json(rename), entry=archive.GRAPHS))


def test_loading_unpickles_nothing(saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    desugar.load(saved[0], native=False)


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(SignatureError("x", "4", "5")))
    assert (error.argument, error.expected, error.got, str(error)) == ("x", "4", "5", "x: expected 4, got 5")


# ---- the command ---------------------------------------------------------------------------------------------


def run(*arguments):
    """The exit code and the output of a command."""
    made = CliRunner().invoke(app, ["package", *map(str, arguments)])
    return made.exit_code, made.output


def test_show_and_call(tmp_path):
    model, place = Block(), tmp_path / "rows.pt2"
    digest = desugar.save(place, model, desugar.call(rows(3, 5, 2)), native=False)
    code, said = run("show", place)
    assert code == 0, said
    for words in (
        "a package for inference",
        f"sha256    {digest}",
        f"torch {torch.__version__}",
        "plain graphs alone",
        "JaggedTensor(values: float32[n2, 8], offsets: int64[(1 + n0)], max_length: n1)",
        "first.weight: float32[16, 8], requires grad, parameter",
        "(x, scale=1.0, *, offset=None)",
        "weights   6 tensors",
    ):
        assert words in said

    x = rows(1, 4)
    inputs, outputs = tmp_path / "inputs.safetensors", tmp_path / "outputs.safetensors"
    save_file({"x.values": x.values, "x.offsets": x.offsets}, inputs, metadata={"x.max_length": "4"})
    code, said = run("call", place, inputs, "--no-native", "-o", outputs)
    assert code == 0, said
    with torch.no_grad():
        torch.testing.assert_close(load_file(outputs)["result.values"], model(x).values)
    code, said = run("call", place, inputs, "--no-native")
    assert code == 0 and "result.values float32[5, 8]" in said


def test_mistakes(tmp_path):
    place, inputs = tmp_path / "sum.pt2", tmp_path / "inputs.safetensors"
    desugar.save(place, lambda x, n: x * n, desugar.call(torch.ones(3), 2), native=False)
    save_file({"y": torch.ones(3)}, inputs)
    for arguments, words in [
        (("show", tmp_path / "none.pt2"), "there is no file"),
        (("call", place, inputs), "holds no machine code"),
        (("call", place, inputs, "--no-native"), "expected the tensors x, got y"),
        (("call", place, place, "--no-native"), "cannot be read as safetensors"),
        (("call", place, inputs, "--no-native", "--class", "no.module:Name"), "expected MODULE:CLASS"),
    ]:
        code, said = run(*arguments)
        assert code == 2 and words in " ".join(said.replace("│", " ").split()), said
    save_file({"x": torch.ones(4)}, inputs)
    code, said = run("call", place, inputs, "--no-native")
    assert code == 2 and "expected 3, got 4" in said
