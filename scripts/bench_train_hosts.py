#!/usr/bin/env python3
"""Measures events per second of two-tower training on one host and on two hosts that are 1 ms apart.

    PYTHONPATH=python python scripts/bench_train_hosts.py --program target/release/sterling [--batches 512 2048 4096] [--delay 1] [--rounds 3]

Model and events are as in `bench_train_events.py`. Each host has one core and a network namespace of its own, joined
by a pair of virtual interfaces; root is needed. A relay in front of host 1 delays the bytes of both directions by `--delay` ms
each: the round trip is twice that. The relay shares the cores with the hosts; `netem` would not, but needs a kernel module. The single host
runs on core 0 alone. Rounds alternate; medians are printed. The packages of one and of two hosts are compared.
"""

import argparse
import hashlib
import json
import pathlib
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import bench_train_events

SPACES = ("sterling-train-a", "sterling-train-b")
ADDRESSES = ("10.77.43.1", "10.77.43.2")
PORT = 7400
# A host with a name listens at all addresses; host 1 finds the relay under this name.
HOSTS = f"localhost:{PORT},localhost:{PORT + 1}"


def run(*command) -> None:
    subprocess.run([str(part) for part in command], check=True)


def pump(source: socket.socket, to: socket.socket, delay: float) -> None:
    """Forwards bytes, each block `delay` seconds after it was received."""
    blocks: queue.Queue = queue.Queue()

    def write() -> None:
        while (item := blocks.get())[1]:
            time.sleep(max(0.0, item[0] - time.monotonic()))
            to.sendall(item[1])
        to.shutdown(socket.SHUT_WR)

    threading.Thread(target=write, daemon=True).start()
    while block := source.recv(1 << 20):
        blocks.put((time.monotonic() + delay, block))
    blocks.put((0.0, b""))


def relay(delay: float) -> None:
    """Accepts host 1 and connects it to host 0."""
    listener = socket.create_server(("127.0.0.1", PORT))
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((ADDRESSES[0], PORT))
        except OSError:
            near.close()
            continue
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(*ends, delay), daemon=True).start()


def command(arguments, folder: pathlib.Path, batch: int, out: str) -> list[str]:
    flags = ["--events", folder / "events.parquet", "--items", folder / "items.parquet", "--out", folder / out, "--judge", 0]
    return [str(part) for part in [arguments.program, "train", folder / f"package-{batch}", *flags, "--checkpoint-steps", 10**9]]


def rate(said: str) -> float:
    return json.loads(said.splitlines()[-1])["events_per_second"]


def one(arguments, folder: pathlib.Path, batch: int) -> float:
    done = subprocess.run(["taskset", "-c", "0", *command(arguments, folder, batch, "one")], stdout=subprocess.PIPE, check=True, text=True)
    return rate(done.stdout)


def two(arguments, folder: pathlib.Path, batch: int) -> float:
    hosts = []
    for rank in (0, 1):
        place = ["ip", "netns", "exec", SPACES[rank], "taskset", "-c", str(rank)]
        flags = ["--hosts", HOSTS, "--rank", str(rank)]
        hosts.append(subprocess.Popen([*place, *command(arguments, folder, batch, "two"), *flags], stdout=subprocess.PIPE, text=True))
    said = [host.communicate()[0] for host in hosts]
    if any(host.returncode for host in hosts):
        raise SystemExit(f"hosts ended with {[host.returncode for host in hosts]}")
    return rate(said[0])


def digest(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/sterling")
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--delay", type=float, default=1.0, help="ms of one direction")
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.relay:
        return relay(arguments.delay / 1000)
    bench_train_events.ROWS = arguments.rows
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        bench_train_events.write(folder, arguments.events)
        for batch in arguments.batches:
            shutil.copytree(folder / "package", folder / f"package-{batch}")
            model = folder / f"package-{batch}/model.toml"
            model.write_text(model.read_text().replace("batch = 512", f"batch = {batch}"))
        for space in SPACES:
            run("ip", "netns", "add", space)
        beside = None
        try:
            run("ip", "link", "add", "strain0", "netns", SPACES[0], "type", "veth", "peer", "name", "strain1", "netns", SPACES[1])
            for rank, space in enumerate(SPACES):
                run("ip", "-n", space, "addr", "add", f"{ADDRESSES[rank]}/24", "dev", f"strain{rank}")
                run("ip", "-n", space, "link", "set", f"strain{rank}", "up")
                run("ip", "-n", space, "link", "set", "lo", "up")
            beside = subprocess.Popen(["ip", "netns", "exec", SPACES[1], sys.executable, __file__, "--relay", "--delay", str(arguments.delay)])
            for batch in arguments.batches:
                alone, both = [], []
                for _ in range(arguments.rounds):
                    for out in ("one", "two"):
                        shutil.rmtree(folder / out, ignore_errors=True)
                    alone.append(one(arguments, folder, batch))
                    both.append(two(arguments, folder, batch))
                    assert digest(folder / "one") == digest(folder / "two"), "the packages of one and of two hosts differ"
                gain = statistics.median(both) / statistics.median(alone)
                print(f"batch {batch}: one host {[round(x) for x in alone]}, two {[round(x) for x in both]} events/s: {gain:.2f} x", flush=True)
        finally:
            if beside:
                beside.kill()
                beside.wait()
            for space in SPACES:
                run("ip", "netns", "del", space)


if __name__ == "__main__":
    main()
