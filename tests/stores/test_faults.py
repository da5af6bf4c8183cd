"""Every call of the program to a bucket gets every fault once: in the end the version exists, or the message has the reason, and
no version is mixed.

The calls are those of a publication, a load, an activation, a label and a lease; the faults are in table.py. The table runs
with the buckets of all three protocols, the other tests with that of moto's S3."""

import collections.abc
import json
import pathlib
import re
import subprocess
import time

import pytest
import table
from conftest import PORTS, PROGRAM, S3, Azure, Bucket, Google
from faults import wait_for
from gcs import Translated
from table import FAULTS, PATIENCE, Table
from test_stores import readyz, text, version


class Faulty(Bucket):
    """A bucket behind a proxy with a table of faults."""

    front = Table
    proxy: Table
    # Prefix of the provider's settings.
    provider: str

    def place(self) -> dict[str, str]:
        return super().place() | {f"{self.provider}_READ_TIMEOUT": f"{int(PATIENCE * 1000)}ms"}

    def tried(self, *arguments: object, cache: str) -> "subprocess.CompletedProcess[str]":
        environment = self.environment | {"STERLING_CACHE__FOLDER": str(self.folder / cache)}
        command = [str(argument) for argument in (PROGRAM, *arguments)]
        return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)

    def whole(self) -> set[int]:
        """Checks that all files match their manifests; returns the existing versions."""
        there = {int(found[1]) for key in self.keys() if (found := re.fullmatch(r"vectors/(\d+)/manifest.json", key))}
        for number in there:
            assert "every checksum holds" in self.run("inspect", f"{self.url}/vectors/{number}", cache="inspector")
        return there


class FaultyS3(Faulty, S3):
    provider = "AWS"


class FaultyAzure(Faulty, Azure):
    provider = "AZURE"


class TranslatedTable(Table, Translated):
    """A table of faults in front of the emulator of Google's store."""


class FaultyGoogle(Faulty, Google):
    front, provider = TranslatedTable, "GOOGLE"


@pytest.fixture
def faulty(moto_port: int, tmp_path: pathlib.Path) -> collections.abc.Iterator[FaultyS3]:
    bucket = FaultyS3(moto_port, tmp_path)
    yield bucket
    bucket.proxy.down()


@pytest.fixture(params=[FaultyS3, FaultyAzure, FaultyGoogle], ids=lambda maker: maker.scheme)
def faulty_of_each_kind(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> collections.abc.Iterator[Faulty]:
    kind = next(kind for kind in PORTS if issubclass(request.param, kind))
    bucket = request.param(request.getfixturevalue(PORTS[kind]), tmp_path)
    yield bucket
    bucket.proxy.down()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_meets_the_fault_once(faulty_of_each_kind: Faulty, fault: str, record_property: collections.abc.Callable[[str, object], None]) -> None:
    faulty = faulty_of_each_kind
    faulty.publish(0, 600)
    with faulty.serve() as running:
        told = []

        def under_fault(*arguments: object, cache: str) -> bool:
            faulty.proxy.begin(fault)
            done = faulty.tried(*arguments, cache=cache)
            faulty.proxy.begin(None)
            if done.returncode:
                # The message names the error and its location.
                assert faulty.name in done.stderr and "panicked" not in done.stderr, done.stderr
                told.append((arguments[0], done.stderr.strip().splitlines()[-1]))
            return done.returncode == 0

        published = under_fault(*faulty.publication(1000, 600), cache="publisher")
        there = faulty.whole()
        assert 1 in there and (not published or len(there) == 2), (there, told)
        if not published:
            faulty.publish(1000, 600)
        newest = max(faulty.whole())
        wait_for("the newest version at the server that ran", lambda: version(running) == newest)
        # A lease that could not be removed belongs to no version, and a later publication removes it.
        activated = under_fault("activate", "vectors", 1, "--store", faulty.url, cache="operator")
        if not activated:
            assert "version 1" in faulty.run("activate", "vectors", 1, "--store", faulty.url, cache="operator")
        wait_for("the desired state", lambda: version(running) == 1)
        if not under_fault("label", "vectors", "new", newest, "--store", faulty.url, cache="operator"):
            faulty.run("label", "vectors", "new", newest, "--store", faulty.url, cache="operator")
        wait_for("the label", lambda: running.get("/v1/models/vectors/labels")["labels"] == {"new": newest})

        # A server of another machine starts and loads, with a fault in each of its calls.
        faulty.proxy.begin(fault)
        with faulty.serve("another machine") as other:
            wait_for("version 1 there", lambda: version(other) == 1, 60)
            wait_for("the label there", lambda: other.get("/v1/models/vectors/labels")["labels"] == {"new": newest}, 60)
            assert version(other, "/labels/new") == newest
            faulty.proxy.begin(None)
            wait_for("a server without warnings", lambda: "warning" not in readyz(other), 60)
        wait_for("no warning of the server that ran", lambda: "warning" not in readyz(running), 60)
    record_property("cases", faulty.proxy.cases)
    print(f"{fault}: {faulty.proxy.cases} cases, reported: {told}")
    assert faulty.proxy.cases > (8 if fault == "409" else 40)


def test_a_stray_object_stops_nobody(faulty: FaultyS3) -> None:
    strays = ["//notes.txt", "/a//b", "/a\x01b", "/vectors/1/../x"]
    entries = "".join(
        f"<Contents><Key>models{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;a&quot;</ETag><Size>1</Size></Contents>"
        for key in strays
    ).replace("\x01", "&#x1;")
    plain = faulty.proxy.pass_on

    def with_strays(method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        status, about, content = plain(method, path, headers, body)
        if "list-type=2" in path and status == 200:
            content = content.replace(b"</ListBucketResult>", entries.encode() + b"</ListBucketResult>")
        return status, about, content

    faulty.publish()
    faulty.proxy.pass_on = with_strays
    with faulty.serve() as server:
        assert "published vectors version 2" in faulty.publish(100)
        wait_for("version 2", lambda: version(server) == 2)
        assert "warning" not in readyz(server)
        assert f"sterling_store_stray_objects {len(strays)}" in text(server, "/metrics")
        assert "every checksum holds" in faulty.run("inspect", f"{faulty.url}/vectors/2")


def made(faulty: FaultyS3, store: pathlib.Path, count: int) -> dict[str, bytes]:
    """Returns the files of a version that is made in a folder, by their keys in the bucket."""
    arguments = [str(argument) for argument in faulty.publication(count, 400)[:-2]]
    subprocess.run([PROGRAM, *arguments, "--store", store], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    number = max(int(path.name) for path in (store / "vectors").iterdir() if path.name.isdigit())
    files = (store / "vectors" / str(number)).iterdir()
    return {f"models/vectors/{number}/{path.name}": path.read_bytes() for path in files if not path.name.startswith(".")}


def test_a_version_copied_manifest_first_is_served_when_its_files_are_there(faulty: FaultyS3, tmp_path: pathlib.Path) -> None:
    first, second = (made(faulty, tmp_path / "made", count) for count in (1, 2))
    for key, content in first.items():
        faulty.ask("PUT", key, content)
    with faulty.serve() as server:
        assert version(server) == 1
        names = sorted(second, key=lambda key: (not key.endswith("manifest.json"), key))
        refused = lambda: next((state.get("refused") for state in server.get("/v1/models/vectors/versions")["versions"] if state["version"] == 2), None)
        for name in names:
            faulty.ask("PUT", name, second[name])
            if name == names[0]:
                wait_for("the rejection", refused)
                wait_for("the warning", lambda: "version 2 was rejected (corrupt), version 1 answers" in readyz(server))
        wait_for("version 2", lambda: version(server) == 2)
        assert "warning" not in readyz(server)


def test_what_became_of_a_served_version_in_the_store_is_a_warning(faulty: FaultyS3) -> None:
    faulty.publish()
    with faulty.serve() as server:
        key = "models/vectors/1/index.safetensors"
        whole = faulty.ask("GET", key)
        faulty.ask("PUT", key, whole[:-1])
        wait_for("the warning", lambda: "version 1 is served from memory, its files in the store were rejected (corrupt)" in readyz(server))
        assert version(server) == 1
        faulty.ask("PUT", key, whole)
        wait_for("no warning", lambda: "warning" not in readyz(server))
        objects = [f"models/{name}" for name in faulty.keys()]
        kept = {name: faulty.ask("GET", name) for name in objects}
        for name in objects:
            faulty.ask("DELETE", name)
        wait_for("the warning", lambda: "version 1 is served from memory, the store does not have it any more" in readyz(server))
        assert version(server) == 1
        for name, content in kept.items():
            faulty.ask("PUT", name, content)
        wait_for("no warning", lambda: "warning" not in readyz(server))


def test_a_server_with_a_copy_waits_for_no_bucket_that_hangs(faulty: FaultyS3) -> None:
    faulty.environment["AWS_READ_TIMEOUT"] = "20s"
    faulty.publish()
    with faulty.serve("machine"):
        pass
    faulty.proxy.begin("silence")
    faulty.proxy.meets = lambda asked: "silence"
    faulty.proxy.closed.wait = lambda _: time.sleep(60)
    began = time.monotonic()
    with faulty.serve("machine") as server:
        took = time.monotonic() - began
        assert version(server) == 1
        assert "no answer yet, previously fetched versions are served" in readyz(server)
    assert took < 15, took


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AWS_SECRET_ACCESS_KEY", "secret\n", "ends with a line break"),
        ("AWS_SESSION_TOKEN", "to\nken", "holds a control character"),
        ("AWS_ENDPOINT_URL", "", "empty, expected a URL"),
    ],
)
def test_variables_that_no_request_can_carry_are_named(faulty: FaultyS3, name: str, value: str, says: str) -> None:
    faulty.environment[name] = value
    done = faulty.tried(*faulty.publication(0, 20), cache="cache")
    assert done.returncode == 2 and name in done.stderr and says in done.stderr and "panicked" not in done.stderr, done.stderr
    assert "secret" not in done.stderr.replace("(a secret made", "")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("RequestTimeTooSkewed", "the clocks of this machine and of the bucket differ"),
        ("SignatureDoesNotMatch", "the secret key does not belong to the access key"),
        ("InvalidAccessKeyId", "does not know the access key"),
        ("AccessDenied", "this caller lacks permission"),
    ],
)
def test_refusals_of_a_bucket_are_told_apart(faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    monkeypatch.setitem(table.STATUSES, "denied", (403, code))
    faulty.proxy.begin("denied")
    faulty.proxy.meets = lambda asked: "denied"
    done = faulty.tried("inspect", faulty.url, cache="cache")
    assert done.returncode == 1 and says in done.stderr, done.stderr


def test_a_slow_link_moves_a_large_file(faulty: FaultyS3) -> None:
    """A file takes longer than any timeout, up and down, but bytes keep moving."""
    faulty.proxy.begin("slow link")
    took = time.monotonic()
    faulty.publish(0, 6000)
    assert "every checksum holds" in faulty.run("inspect", f"{faulty.url}/vectors/1", cache="another machine")
    assert time.monotonic() - took > 2 * PATIENCE
    assert json.loads(faulty.ask("GET", "models/vectors/1/manifest.json"))["items"] == 6000
