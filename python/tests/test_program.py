"""The program from Python: its arguments, its output, its end."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest
import sterling


def test_a_store_is_served_and_the_server_ends(store, program):
    with sterling.serve(store, program=program) as server:
        answer = server.post("/v1/models/tiny:retrieve", {"features": {"installed": [1, 2]}, "k": 3})
        assert len(answer["items"]) == 3
        with pytest.raises(sterling.RequestError, match="unknown feature `colour`") as wrong:
            server.post("/v1/models/tiny:retrieve", {"features": {"colour": [1]}})
        assert (wrong.value.status, wrong.value.code, wrong.value.retryable) == (400, "invalid", False)
        with pytest.raises(sterling.RequestError, match="404"):
            server.get("/v1/models/nothing")
        assert "sterling_" in server.get("/metrics")
        process = server._process
    assert process.poll() == 0
    server.close()


def test_no_proxy_stands_before_the_loopback(store, program, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        # A port without a listener.
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with sterling.serve(store, program=program, timeout=20) as server:
        assert server.get("/v1/models")["models"]
        pytest.importorskip("httpx")
        with sterling.Client(server.url) as client:
            assert len(client.retrieve("tiny", features={"installed": [1]}, k=3)) == 3


def test_two_servers_take_two_ports(store, program):
    with sterling.serve(store, program=program, model="tiny") as one, sterling.serve(store, program=program) as other:
        assert one.url != other.url


def test_a_server_that_cannot_start_says_why(tmp_path, program):
    with pytest.raises(sterling.ProgramError, match="ended with 2.*nowhere"):
        sterling.serve(tmp_path / "nowhere", program=program)
    with pytest.raises(sterling.ProgramError, match="not ready"):
        (tmp_path / "empty").mkdir()
        sterling.serve(tmp_path / "empty", program=program, timeout=1)


def test_a_package_learns_from_events(tmp_path, tiny, program):
    package, events = tmp_path / "package", tmp_path / "events.jsonl"
    shutil.copytree(tiny, package)
    with (package / "model.toml").open("a") as file:
        file.write('\n[train]\nlabel = "click"\nbatch = 16\nuniform = 8\ntemperature = 0.2\n')
    users = ({"installed": [n % 11], "section": "games", "size": [0.5, 0.25, 0.125]} for n in range(2000))
    lines = (json.dumps({"id": n, "user": user, "item": n % 11 + 1, "labels": {"click": 1}}) for n, user in enumerate(users))
    events.write_text("\n".join(lines))
    report = sterling.train(package, events, tmp_path / "learned", seed=3, program=program)
    assert (report["events"], report["refused"]) == (2000, 0)
    assert report["learned"]["ndcg@10"] > report["frozen"]["ndcg@10"]
    version = sterling.publish(tmp_path / "learned", tmp_path / "store", program=program)
    assert version.version == 1 and sterling.load_snapshot(version.folder)
    with pytest.raises(sterling.ProgramError, match="it exists, expected a path that does not"):
        sterling.train(package, [events], tmp_path / "learned", program=program)


def test_what_publish_refuses_is_told(tmp_path, program):
    (tmp_path / "model.toml").write_text("name = 'x'\ndimension = 0\n")
    (tmp_path / "items.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(sterling.ProgramError, match="dimension: got 0"):
        sterling.publish(tmp_path, tmp_path / "store", program=program)


def test_versions_count_up(store, tiny, program, tmp_path):
    versions = [sterling.publish(tiny, tmp_path, items=tiny / "items.jsonl", program=program) for _ in range(2)]
    assert [published.version for published in versions] == [1, 2]
    assert versions[1].folder == tmp_path / "tiny/2" and sterling.load_snapshot(versions[1].folder).version == 2


def test_the_program_is_looked_for_and_missed(monkeypatch, tmp_path, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("STERLING", raising=False)
    assert sterling.find_program(required=False) is None
    with pytest.raises(sterling.ProgramError, match="not on PATH"):
        sterling.find_program()
    with pytest.raises(sterling.ProgramError, match="is no program"):
        sterling.find_program(tmp_path / "sterling", required=False)
    monkeypatch.setenv("STERLING", str(program))
    assert sterling.find_program() == program


def test_nothing_but_numpy_is_imported():
    check = "import sys, sterling; print(sorted({'torch', 'onnx', 'safetensors', 'onnxruntime'} & set(sys.modules)))"
    done = subprocess.run([os.sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_brings_whatever_program_was_built(tmp_path, monkeypatch):
    """Runs the build hook, with only the base class of hatchling."""
    names = "hatchling.builders.hooks.plugin.interface"
    interface = types.ModuleType(names)
    interface.BuildHookInterface = object
    for part in range(1, len(names.split(".")) + 1):
        name = ".".join(names.split(".")[:part])
        monkeypatch.setitem(sys.modules, name, interface if name == names else types.ModuleType(name))
    spec = importlib.util.spec_from_file_location("hatch_build", pathlib.Path(__file__).parents[1] / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("STERLING_PROGRAM", "STERLING_PLATFORM", "CARGO_TARGET_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "models/debian").mkdir(parents=True)
    warned = []

    def brought():
        hook = module.ProgramHook()
        hook.root, hook.app = str(tmp_path / "python"), types.SimpleNamespace(display_warning=warned.append)
        data = {"shared_scripts": {}, "shared_data": {}}
        hook.initialize("standard", data)
        return list(data["shared_scripts"])

    assert brought() == [] and "the package has no program" in warned[0]
    # The fastest existing build is used.
    for profile in ("debug", "quick", "release", "dist"):
        made = tmp_path / "target" / profile / "sterling"
        made.parent.mkdir(parents=True)
        made.touch()
        assert brought() == [str(made)]
    elsewhere = tmp_path / "elsewhere/quick/sterling"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.touch()
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path / "elsewhere"))
    assert brought() == [str(elsewhere)] and len(warned) == 1
