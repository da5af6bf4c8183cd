"""`sterling doctor` over two shards, two replicas each, a router and a bucket: all of them real."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess

from conftest import PROGRAM, Bucket
from faults import free_port, wait_for


def examined(bucket: Bucket, *asked: str) -> tuple[int, dict]:
    """Returns the exit code and the report of the doctor for a fleet."""
    doctor = bucket.start("doctor", *asked, "--json", cache="doctor")
    out, err = doctor.communicate(timeout=60)
    assert out, err
    return doctor.returncode, json.loads(out)


def test_the_doctor_says_what_is_wrong_and_nothing_where_all_is_well(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    bucket.publish(0, 400, "--shards", 2)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(bucket.serve(f"shard {shard}, replica {replica}", STERLING_SHARD=str(shard)))
            for shard in (0, 1)
            for replica in (0, 1)
        ]
        names = [server.url.removeprefix("http://") for server in servers]
        route = f"127.0.0.1:{free_port()}"
        command = [PROGRAM, "route", "--listen", route, *(argument for name in names for argument in ("--server", name))]
        environment = {"STERLING_ROUTE__REFRESH_MS": "100"} | dict(os.environ)
        router = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(router.kill)
        asked = [argument for name in names for argument in ("--server", name)] + ["--router", route, "--store", bucket.url]
        wait_for("a fleet that is well", lambda: examined(bucket, *asked)[0] == 0)
        code, report = examined(bucket, *asked)
        assert (code, report["wrong"]) == (0, [])
        assert sorted((server["parts"][0]["shard"], server["name"]) for server in report["servers"]) == sorted(zip((0, 0, 1, 1), names))
        assert list(report["stores"][0]["models"]["vectors"]["versions"]) == ["1"]
        said = bucket.run("doctor", *asked, cache="doctor")
        assert said.strip().endswith("all is well") and said.count(" 0/2 ") == said.count(" 1/2 ") == 2

        # A desired version that one shard cannot load.
        bucket.proxy.fault("GET", "2/shard-1/index.safetensors", "flip", times=1000, at=50)
        bucket.publish(100, 400, "--shards", 2)
        bucket.run("activate", "vectors", 2, "--store", bucket.url)
        wait_for("the desired state", lambda: any(f"not active at {', '.join(sorted(names[2:]))}" in wrong for wrong in examined(bucket, *asked)[1]["wrong"]))
        code, report = examined(bucket, *asked)
        assert code == 1
        assert any("rejected vectors version 2" in wrong and "index.safetensors" in wrong for wrong in report["wrong"])
        bucket.proxy.faults.clear()
        bucket.run("activate", "vectors", 1, "--store", bucket.url)
        wait_for("version 1", lambda: not any("several versions" in wrong or "not active" in wrong for wrong in examined(bucket, *asked)[1]["wrong"]))

        # A dead server, and an unreachable store.
        os.kill(servers[3]._process.pid, signal.SIGKILL)
        bucket.proxy.down()
        _, report = examined(bucket, *asked[:-2])
        assert any(f"server {names[3]} accepts no requests" in wrong for wrong in report["wrong"])
        assert any("shard 1 of 2 has 1 replicas, others have 2" in wrong for wrong in report["wrong"]), report["wrong"]
        code, report = examined(bucket, "--store", bucket.url)
        assert code == 1 and "cannot be read" in report["wrong"][0]
        assert bucket.run("doctor", expect=2)
