"""Shared code of the benchmarks: a store with the Debian model, servers as processes, requests, `sterling bench`, verdicts.

Variables: STERLING is the measured binary (target/release/sterling), PEER the baseline (default none), STORE the store of the
Debian model (default a temporary folder), SECONDS the duration of each load.
"""

import atexit
import contextlib
import http.client
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from program import ROOT, STERLING

PEER = os.environ.get("PEER", "")
# All binaries are measured with the same load generator, since an older PEER may lack the `bench` command.
BENCH = os.environ.get("BENCH", STERLING)
FOLDER = Path(tempfile.mkdtemp(prefix="sterling-measure-"))
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def seconds(default):
    """Returns the duration of a load: SECONDS, or the default."""
    return float(os.environ.get("SECONDS", default))


def binaries():
    """Returns the measured binaries by name: STERLING, then PEER if it is set."""
    return {"sterling": STERLING} | ({"peer": PEER} if PEER else {})


def store(binary=STERLING, name="store", more=()):
    """Returns a store with the Debian model, published by the binary."""
    path = Path(os.environ["STORE"]) if "STORE" in os.environ and name == "store" else FOLDER / name
    if not (path / "debian").exists():
        path.mkdir(exist_ok=True)
        publish(binary, path, more)
    return path


def publish(binary, path, more=(), package=ROOT / "models/debian"):
    """Publishes the Debian model, or a similar package, as the next version of a store."""
    command = [binary, "publish", str(package), "--store", str(path), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def users():
    """Returns bodies of retrievals for the held-out users."""
    lines = (ROOT / "models/debian/heldout.jsonl").read_text().splitlines()
    return [{"features": user["features"], "exclude": user["exclude"]} for user in map(json.loads, lines)]


def requests_file(name, bodies):
    """Writes a file of requests, one per line."""
    path = FOLDER / f"{name}.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return str(path)


class Server:
    """A running `sterling serve`; ends with the `with` block."""

    def __init__(self, binary, store, *arguments, environment=None, listen="127.0.0.1:0"):
        self.arguments = [binary, "serve", "--store", str(store), "--listen", listen, *arguments]
        self.environment = os.environ | (environment or {})

    def within(self, group):
        """Returns the server, which will start in this cgroup."""
        self.arguments = [*group.command, *self.arguments]
        return self

    def __enter__(self):
        self.process = subprocess.Popen(
            self.arguments, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.process.stdout:
            if found := re.search(r"http://([\d.:]+)", line):
                self.address = found[1]
                break
        else:
            sys.exit(f"{self.arguments[0]} ended before it listened")
        self.url = f"http://{self.address}"
        wait("the server is ready", lambda: self.get("/readyz")[0] == 200, 600)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    @property
    def pid(self):
        return self.process.pid

    def connect(self, timeout=120):
        host, port = self.address.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
        connection.connect()
        # A request is sent with two writes; without this option the second would wait for the acknowledgement of the first.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def get(self, path):
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def post(self, path, body, connection=None):
        """Returns status and parsed answer of a POST; a passed connection stays open."""
        asked = connection or self.connect()
        asked.request("POST", path, None if body is None else json.dumps(body), {"content-type": "application/json"})
        answer = asked.getresponse()
        status, text = answer.status, answer.read()
        if connection is None:
            asked.close()
        return status, json.loads(text or b"null")

    def retrieve(self, body, connection=None):
        return self.post("/v1/models/debian:retrieve", body, connection)

    def stat(self):
        """Returns page faults without I/O, seconds of CPU time, bytes in memory."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[7]), (int(fields[11]) + int(fields[12])) / TICK, int(fields[21]) * PAGE

    def rss_mb(self):
        return self.stat()[2] / 1e6

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class Router(Server):
    """A running `sterling route` over servers."""

    def __init__(self, servers, environment=None):
        self.arguments = [STERLING, "route", "--listen", "127.0.0.1:0"]
        for server in servers:
            self.arguments += ["--server", server.address]
        self.environment = os.environ | (environment or {})


def keys(*names):
    """Writes a file of access keys; returns its path, and a key with the role `read` for each name. The key `router` is a router's."""
    path = FOLDER / "keys.toml"
    flags = lambda name: ["--router"] if name == "router" else []
    ask = lambda name: subprocess.run([STERLING, "key", name, *flags(name), "--file", str(path)], stdout=subprocess.PIPE, text=True, check=True)
    return str(path), {name: ask(name).stdout.strip() for name in names}


@contextlib.contextmanager
def beside(attack, *arguments):
    """Runs `attack(*arguments, stop, found)` in a low-priority process until the block ends. Counts that `attack` puts into `found`
    are then in the dictionary of the block, by name."""
    context, counts = multiprocessing.get_context("fork"), {}
    stop, (found, sent) = context.Event(), context.Pipe(duplex=False)

    def run():
        os.nice(19)
        attack(*arguments, stop, sent)

    attacker = context.Process(target=run, daemon=True)
    attacker.start()
    yield counts
    stop.set()
    counts.update(found.recv())
    attacker.join()


def wait(what, is_so, seconds_max=60):
    """Waits until a condition holds."""
    start = time.time()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if is_so():
                return
        if time.time() - start > seconds_max:
            sys.exit(f"timed out waiting until {what}")
        time.sleep(0.02)


def bench(url, *arguments):
    """Returns the JSON lines of a run of `sterling bench`. A void run has exit status 1, and its line says that it is void."""
    # If the server takes every core, the generator keeps its schedule only with a higher priority.
    first = ["nice", "-n", "-10"] if os.geteuid() == 0 else []
    command = [*first, BENCH, "bench", url, "--json", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if not done.stdout:
        print(done.stderr, file=sys.stderr)
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values):
    return quantile(values, 0.5)


def row(*cells):
    print("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def header(*cells):
    row(*cells)
    row(*["---"] * len(cells))


MISSED = []


def verdict(holds, text):
    """Prints whether a target is met; `finish` exits with 1 if one was missed."""
    print(f"{'met   ' if holds else 'MISSED'} {text}", flush=True)
    if not holds:
        MISSED.append(text)


def finish():
    sys.exit(1 if MISSED else 0)
