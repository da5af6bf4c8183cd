#!/usr/bin/env python3
"""Offline scoring on a Ray cluster of two nodes under faults: no rows are lost or duplicated, and all bytes equal those of an
undisturbed run.

    PYTHONPATH=python VENV/bin/python scripts/ray_score.py [--program target/release/sterling]

VENV has `ray`, `numpy` and `xxhash`. The nodes run in two network namespaces of this machine, joined by a pair of virtual
interfaces, because Ray listens on all addresses that it finds; this needs root. All processes are started in the namespaces and
end with these. Each run kills one of: a worker's process, an actor, the driver (which is restarted), a node. The kill happens when
some files are finished and some are not.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPACES = ("sterling-ray-a", "sterling-ray-b")
ADDRESSES = ("10.77.41.1", "10.77.41.2")
PORT = 6391
ITEMS, FILES, ROWS = 3000, 24, 1500
REQUEST = {"k": 20}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inside(space: str, *command: str, **more) -> subprocess.Popen:
    return subprocess.Popen(["ip", "netns", "exec", space, *command], stdin=subprocess.DEVNULL, **more)


class Cluster:
    """Two nodes in two namespaces."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.processes = folder, []

    def __enter__(self):
        for space in SPACES:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", "sterl-a", "netns", SPACES[0], "type", "veth", "peer", "name", "sterl-b", "netns", SPACES[1])
        for space, device, address in zip(SPACES, ("sterl-a", "sterl-b"), ADDRESSES, strict=True):
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", space, "link", "set", device, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
        self.start(0)
        self.start(1)
        return self

    def start(self, node: int) -> None:
        """Starts a node and waits until the cluster knows it."""
        ray = pathlib.Path(sys.executable).parent / "ray"
        place = ["--head", f"--port={PORT}", "--include-dashboard=false"] if node == 0 else [f"--address={ADDRESSES[0]}:{PORT}"]
        common = [f"--node-ip-address={ADDRESSES[node]}", "--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        log = open(self.folder / f"ray-{node}.log", "ab")
        self.processes.append(inside(SPACES[node], str(ray), "start", *place, *common, stdout=log, stderr=log))
        for _ in range(120):
            time.sleep(1)
            if b"Ray runtime started" in (self.folder / f"ray-{node}.log").read_bytes():
                return
        raise SystemExit(f"node {node} did not start: {(self.folder / f'ray-{node}.log').read_text()[-2000:]}")

    def pids(self, node: int) -> list[int]:
        return [int(pid) for pid in run("ip", "netns", "pids", SPACES[node]).split()]

    def find(self, node: int, *words: str) -> list[int]:
        """Returns the processes of a node whose command lines contain these words."""
        found = []
        for pid in self.pids(node):
            try:
                line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(pid)
        return found

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def __exit__(self, *_):
        for node in (0, 1):
            self.kill(self.pids(node))
        for process in self.processes:
            process.wait()
        for space in SPACES:
            run("ip", "netns", "del", space)


def drive(job: dict) -> None:
    """Runs the driver, in its own process."""
    import ray
    import sterling.ray

    ray.init(address=f"{ADDRESSES[0]}:{PORT}", log_to_driver=False, logging_level="warning")
    print(json.dumps(sterling.ray.score(**job, max_problems=FILES, told=lambda done, all: print(f"{done} of {all}", flush=True))))


def outputs(folder: pathlib.Path) -> dict[str, str]:
    names = [*folder.glob("part-*"), *folder.glob("_part-*"), folder / "_SUCCESS.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def prepare(folder: pathlib.Path, program: str) -> dict:
    """Creates a store, files of users, and the output of an undisturbed run."""
    vector = lambda n: [round(math.sin(n * (i + 1) * 0.37) + 0.1 * i, 6) for i in range(16)]  # noqa: E731
    with open(folder / "items.jsonl", "w") as out:
        out.writelines(json.dumps({"id": n, "embedding": vector(n)}) + "\n" for n in range(ITEMS))
    run(program, "publish", "--name", "shop", "--items", str(folder / "items.jsonl"), "--store", str(folder / "store"))
    for n in range(FILES):
        with open(folder / f"users-{n:02}.jsonl", "w") as out:
            rows = ({"id": id, "vector": vector(id * 0.5), "exclude": [id % ITEMS]} for id in range(n * ROWS, (n + 1) * ROWS))
            out.writelines(json.dumps(row) + "\n" for row in rows)
        with open(folder / f"users-{n:02}.jsonl", "a") as out:
            out.write('{"id": "wrong"}\n')
    inputs = sorted(str(path) for path in folder.glob("users-*.jsonl"))
    start = time.monotonic()
    shared = ["--model", "shop@1", "--store", str(folder / "store"), "--request", json.dumps(REQUEST)]
    said = run(program, "score", *shared, "--in", *inputs, "--out", str(folder / "alone"), "--max-problems", str(FILES))
    print(f"alone: {said.strip()}, {time.monotonic() - start:.1f} s")
    return {"inputs": inputs, "model": "shop@1", "store": str(folder / "store"), "request": REQUEST, "program": program}


def scored(folder: pathlib.Path) -> int:
    return len(list(folder.glob("part-*.parquet")))


def chaos(cluster: Cluster, folder: pathlib.Path, job: dict, what: str) -> None:
    """Runs a job and kills the named part of it once some files are finished and some are not."""
    out = folder / what
    job = job | {"output": str(out)}
    environment = os.environ | {"RAY_DEDUP_LOGS": "0"}

    def driver() -> subprocess.Popen:
        command = [sys.executable, __file__, "--drive", json.dumps(job)]
        return inside(SPACES[0], *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    start = time.monotonic()
    process = driver()
    while scored(out) < 4 and process.poll() is None and time.monotonic() - start < 120:
        time.sleep(0.02)
    # Both nodes have a busy worker.
    workers = [cluster.find(node, "score", "--units") for node in (0, 1)]
    before = scored(out)
    if process.poll() is not None or not 4 <= before < FILES or not all(workers):
        cluster.kill([process.pid])
        raise SystemExit(f"{what}: nothing ran that could be killed: {before} files, workers {workers}: {process.stdout.read()}")
    match what:
        case "process":
            cluster.kill(workers[1])
        case "actor":
            parents = [int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in workers[1]]
            cluster.kill(parents)
        case "driver":
            cluster.kill([process.pid, *cluster.find(0, "--drive")])
            process.wait()
            time.sleep(3)
            left = [pid for node in (0, 1) for pid in cluster.find(node, "score", "--units")]
            if left:
                raise SystemExit(f"driver: its workers continue after the kill: {left}")
            before = scored(out)
            process = driver()
        case "node":
            cluster.kill(cluster.pids(1))
    said, _ = process.communicate(timeout=300)
    took = time.monotonic() - start
    if process.returncode != 0:
        raise SystemExit(f"{what}: {said}")
    if outputs(out) != outputs(folder / "alone"):
        raise SystemExit(f"{what}: the outputs differ from those of an undisturbed run")
    counts = json.loads((out / "_SUCCESS.json").read_text())
    assert counts == {"rows": FILES * (ROWS + 1), "scored": FILES * ROWS, "problems": {"invalid": FILES}}, counts
    left = [path.name for path in out.iterdir() if path.name.startswith((".part-", "._part-"))]
    assert not left, left
    print(f"{what} killed after {before} of {FILES} files: all {counts['rows']} rows, byte-equal, {took:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "target/release/sterling"))
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        return drive(json.loads(arguments.drive))
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        job = prepare(folder, str(pathlib.Path(arguments.program).resolve()))
        with Cluster(folder) as cluster:
            for what in ("process", "actor", "driver", "node"):
                chaos(cluster, folder, job, what)


if __name__ == "__main__":
    main()
