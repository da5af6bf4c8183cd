"""The container image, built and started without a daemon and without a registry.

`umoci`, `skopeo` and `runc` of the distribution stand in for a registry and a node: they read the layout, unpack it, and start
it in its own namespaces as its user, with a read-only root and no privileges. If the kernel provides no namespaces, the layout
is only read and unpacked, and the test reports that."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))
TAG = "test"
USER = 10001

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("umoci", "skopeo", "runc"))), reason="no umoci, skopeo or runc")


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("images") / "image"
    run(sys.executable, ROOT / "scripts/build_image.py", "--program", PROGRAM, "--tag", TAG, folder)
    return folder


@pytest.fixture(scope="module")
def bundle(image: pathlib.Path) -> pathlib.Path:
    """Returns the unpacked image as a runtime bundle."""
    folder = image.parent / "bundle"
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    run("umoci", "unpack", *rootless, "--image", f"{image}:{TAG}", folder)
    return folder


def test_the_image_says_what_it_is(image: pathlib.Path) -> None:
    told = json.loads(run("skopeo", "inspect", "--config", f"oci:{image}:{TAG}"))
    assert told["config"]["User"] == f"{USER}:{USER}" and told["config"]["Entrypoint"] == ["/usr/local/bin/sterling"]
    version = run(PROGRAM, "--version").split()[-1]
    assert told["config"]["Labels"]["org.opencontainers.image.version"] == version
    # Copying to another form verifies the digest of every blob.
    run("skopeo", "copy", "--insecure-policy", f"oci:{image}:{TAG}", f"dir:{image.parent / 'copy'}")
    dockerfile = (ROOT / "deploy/cpu.Dockerfile").read_text()
    assert f"USER {USER}" in dockerfile and f"CMD {json.dumps(told['config']['Cmd'])}" in dockerfile


def test_the_same_program_makes_the_same_bytes(image: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run(sys.executable, ROOT / "scripts/build_image.py", "--program", PROGRAM, "--tag", TAG, tmp_path / "image")
    assert (tmp_path / "image/index.json").read_bytes() == (image / "index.json").read_bytes()


def test_it_holds_the_program_its_libraries_and_nothing_else(bundle: pathlib.Path) -> None:
    root = bundle / "rootfs"
    files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    programs = [path for path in files if os.access(root / path, os.X_OK) and ".so" not in path]
    assert programs == ["usr/local/bin/sterling"]
    assert all(path.startswith(("etc/", "lib", "usr/lib")) or path in programs for path in files), files
    if os.geteuid() == 0:
        assert {(root / path).stat().st_uid for path in ("store", "var/lib/sterling")} == {USER}


@contextlib.contextmanager
def started(bundle: pathlib.Path, store: pathlib.Path) -> Iterator[subprocess.Popen]:
    """Runs the container over a store."""
    path = bundle / "config.json"
    spec = json.loads(path.read_text())
    process = spec["process"]
    process["terminal"] = False
    process["args"] = ["/usr/local/bin/sterling", "serve", "--store", "/store", "--listen", "127.0.0.1:0"]
    process["env"] = ["PATH=/usr/local/bin", "STERLING_HTTP__DRAIN_MS=0"]
    process["noNewPrivileges"] = True
    process["capabilities"] = {}
    spec["root"]["readonly"] = True
    # The test uses the loopback interface of the machine.
    spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "network"]
    spec["linux"].pop("resources", None)
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["destination"] not in ("/sys", "/sys/fs/cgroup")]
    spec["mounts"].append({"destination": "/store", "type": "bind", "source": str(store), "options": ["bind", "ro"]})
    path.write_text(json.dumps(spec))
    name = f"sterling-test-{os.getpid()}"
    command = ["runc", "run", "--pid-file", bundle / "pid", "--bundle", bundle, name]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as container:
        try:
            yield container
        finally:
            subprocess.run(["runc", "kill", name, "TERM"], capture_output=True)
            try:
                container.wait(20)
            except subprocess.TimeoutExpired:
                subprocess.run(["runc", "delete", "--force", name], capture_output=True)
                container.wait(20)


def test_it_starts_and_answers_without_rights(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    namespaces = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if namespaces.returncode != 0:
        print(f"the image was read and unpacked, and not started: {namespaces.stderr.strip()}")
        pytest.skip("the kernel gives no namespaces")
    items = tmp_path / "items.jsonl"
    items.write_text("".join(f'{{"id": {n}, "embedding": [1, {n}]}}\n' for n in range(50)))
    store = tmp_path / "store"
    run(PROGRAM, "publish", "--name", "vectors", "--items", items, "--store", store)
    # The user of the image does not exist on this machine.
    for path in (store, *store.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with started(bundle, store) as container:
        assert container.stdout is not None
        lines = []
        url = next((found[0] for line in container.stdout if lines.append(line) or (found := re.search(r"http://[\d.:]+", line))), None)
        assert url, lines
        threading.Thread(target=container.stdout.read, daemon=True).start()
        end = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(f"{url}/v1/models/vectors:retrieve", b'{"vector": [0, 1], "k": 3}', timeout=5) as answer:
                    found = [item["id"] for item in json.load(answer)["items"]]
                break
            except OSError as error:
                assert container.poll() is None and time.monotonic() < end, error
                time.sleep(0.1)
        assert found == [49, 48, 47]
        # The program may answer before its process id is written.
        while not (bundle / "pid").exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        text = pathlib.Path("/proc", (bundle / "pid").read_text().strip(), "status").read_text()
        status = dict(line.split(":", 1) for line in text.splitlines())
        assert set(status["Uid"].split()) == {str(USER)} and int(status["CapEff"], 16) == 0 and status["NoNewPrivs"].strip() == "1"
    assert container.returncode == 0, "it ends by a signal as it does anywhere"
