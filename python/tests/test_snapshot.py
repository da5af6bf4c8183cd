"""Published versions as arrays, and incomplete versions."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import sterling
from sterling.snapshot import decoded, read_tensors

safetensors = pytest.importorskip("safetensors.numpy")


@pytest.fixture
def copy(store, tmp_path):
    shutil.copytree(store / "tiny/1", tmp_path / "1")
    return tmp_path / "1"


def test_a_version_is_what_was_published(store, tiny):
    snapshot = sterling.load_snapshot(store / "tiny/1")
    assert (snapshot.name, snapshot.version, snapshot.dimension) == ("tiny", 1, 4)
    items = {json.loads(line)["id"]: json.loads(line)["attributes"] for line in (tiny / "items.jsonl").read_text().splitlines()}
    ids, vectors = snapshot.vectors()
    assert sorted(ids.tolist()) == sorted(items) and vectors.shape == (len(items), 4)
    slots = snapshot.index.slots
    assert len(slots) == len(items) == snapshot.index.list_lengths.sum()
    assert (snapshot.index.decoded(np.setdiff1d(np.arange(snapshot.manifest["slots"]), slots)) == 0).all()
    step = snapshot.index.scales[slots, None]
    assert (np.abs(snapshot.index.decoded(slots) - vectors) <= step * 0.5001).all()
    for slot, item in zip(slots, ids):
        assert snapshot.columns["section"].values(slot) == [items[item]["section"]]
        assert snapshot.columns["popularity"].values(slot) == [items[item]["popularity"]]
    members = np.concatenate([snapshot.index.members(n) for n in range(snapshot.manifest["lists"])])
    assert (members == slots).all()
    assert snapshot.recipe["index"]["rescore"] == "f32"
    assert set(snapshot.graphs) == {"user.onnx", "item.onnx", "overarch.onnx"}
    assert "tiny version 1" in repr(snapshot)


def test_tables_are_those_of_the_package_within_their_format(store, tiny):
    snapshot = sterling.load_snapshot(store / "tiny/1")
    stored = safetensors.load_file(tiny / "tables.safetensors")
    assert set(snapshot.tables) == set(stored) == {"packages", "sections"}
    assert (snapshot.tables["sections"] == stored["sections"].astype(np.float32)).all()
    wanted = stored["packages"].astype(np.float32)
    step = np.ptp(wanted, axis=1, keepdims=True) / 255
    assert (np.abs(snapshot.tables["packages"] - wanted) <= step / 2 + np.abs(wanted).max() * 2**-10).all()
    assert snapshot.vocabularies["sections"] == (tiny / "sections.txt").read_text().splitlines()


def test_arrays_are_mapped_and_cannot_be_written(store):
    codes = sterling.load_snapshot(store / "tiny/1").index.codes
    assert not codes.flags.owndata and not codes.flags.writeable


def test_files_are_read_as_the_safetensors_library_reads_them(store):
    for file in (store / "tiny/1").glob("*.safetensors"):
        ours, theirs = read_tensors(file), safetensors.load_file(file)
        assert set(ours) == set(theirs)
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and ours[name].tobytes() == tensor.tobytes(), name


def test_bfloat16_is_widened(tmp_path):
    numbers = np.array([1.0, -2.5, 3e38], np.float32)
    header = json.dumps({"x": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + (numbers.view("<u4") >> 16).astype("<u2").tobytes())
    assert np.allclose(read_tensors(path)["x"], numbers, rtol=2**-7)


def test_quantised_rows_are_decoded_from_their_low_bits():
    head = np.array([[0.5, -1.0]], "<f2").view("u1")
    assert decoded(np.hstack([head, [[0x21, 0x43]]]).astype("u1"), "int4").tolist() == [[-0.5, 0.0, 0.5, 1.0]]
    assert decoded(np.hstack([head, [[0b11100100]]]).astype("u1"), "int2").tolist() == [[-1.0, -0.5, 0.0, 0.5]]
    with pytest.raises(sterling.SnapshotError, match="fp8"):
        decoded(head, "fp8")


@pytest.mark.parametrize("file", ["index.safetensors", "model.toml", "user.onnx", "sections.txt"])
def test_a_flipped_byte_is_found(copy, file):
    data = bytearray((copy / file).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / file).write_bytes(data)
    with pytest.raises(sterling.SnapshotError, match=f"{file}: got checksum"):
        sterling.load_snapshot(copy)


def test_missing_and_shortened_files_are_found(copy):
    data = (copy / "index.safetensors").read_bytes()
    (copy / "index.safetensors").write_bytes(data[:-1])
    with pytest.raises(sterling.SnapshotError, match=f"{len(data) - 1} bytes, expected {len(data)}"):
        sterling.load_snapshot(copy)
    with pytest.raises(sterling.SnapshotError, match="is invalid"):
        sterling.load_snapshot(copy, check=False)
    (copy / "index.safetensors").unlink()
    with pytest.raises(sterling.SnapshotError, match="No such file"):
        sterling.load_snapshot(copy)


def test_manifests_of_other_formats_and_shapes_are_refused(copy, tmp_path):
    manifest = json.loads((copy / "manifest.json").read_text())
    for change, said in [
        ({"format": 2}, "format 2, expected 1 to 1"),
        ({"format": None}, "format None"),
        ({"files": []}, "names no index.safetensors"),
        ({"files": {"index.safetensors": 1, "model.toml": 2}}, "names no index.safetensors"),
        ({"files": manifest["files"] | {"../x": {"bytes": 0, "xxh3": ""}}}, "expected a plain name"),
    ]:
        (copy / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(sterling.SnapshotError, match=said):
            sterling.load_snapshot(copy)
    for text in ("", "[]", "{"):
        (copy / "manifest.json").write_text(text)
        with pytest.raises(sterling.SnapshotError):
            sterling.load_snapshot(copy)
    with pytest.raises(sterling.SnapshotError, match="no published version"):
        sterling.load_snapshot(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F12", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": None},
        [],
    ],
)
def test_wrong_tensor_entries_are_refused(tmp_path: pathlib.Path, entry):
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(sterling.SnapshotError, match="tensor `x` is invalid"):
        read_tensors(path)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"\xff\xff", bytes(8)])
def test_what_is_no_tensor_file_is_refused(tmp_path: pathlib.Path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(sterling.SnapshotError, match="safetensors"):
        read_tensors(path)
