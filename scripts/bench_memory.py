#!/usr/bin/env python3
"""Tests whether answers of any form stay within the advised memory.

    STERLING=... [SECONDS=120] [ITEMS=100000] [CONNECTIONS=48] [SEED=1] scripts/bench_memory.py

A server with the memory that `sterling serve --check` advises and a router with the memory that docs/guide/operate.md advises run in
cgroups with this limit, as root. A client requests random answers of all forms from both: JSON, columns, Arrow, tensors, pages,
lists, rankings, items by text and values of columns; any number of results up to the limit, columns of 0 to 64 kB per item;
compressed or not; read at once, slowly, or aborted. Neither process may be killed or reach the advice, and the p99 of small
requests of another caller at the server may be at most 3 times its value without load. The same requests to a second server
without other callers show what the processes that share the cores cost.

Needs cgroups of version 1 or 2; without them nothing is measured. RLIMIT_AS is no substitute: it limits address space, of
which a process maps far more than it uses.
"""

import collections
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from served import FOLDER, STERLING, Router, Server, bench, beside, finish, header, keys, requests_file, row, seconds, verdict, wait

ITEMS = int(os.environ.get("ITEMS", 100_000))
CONNECTIONS = int(os.environ.get("CONNECTIONS", 48))
SEED = int(os.environ.get("SEED", 1))
RATE = 20
PROGRAM_MB = 512
RESULTS_MAX, CANDIDATES_MAX, LIST_MAX = 100_000, 200_000, 1024
WIDTHS = [0, 1, 64, 1_000, 8_000, 64_000]
# Columns of each model: a few items with the widest texts, many items with texts of 0 to 4 kB.
COLUMNS = {"wide": [*(f"text{width}" for width in WIDTHS), "number", "tags"], "many": ["name", "text", "number", "tags"]}
COUNTS = {"wide": max(20, ITEMS // 50), "many": ITEMS}
# Forms of answers of each process; the last three are served by the server only.
ROUTED = ["json", "columns", "arrow", "pages", "list", "rank"]
FORMS = {"router": ROUTED, "server": [*ROUTED, "tensors", "find", "values"]}
PAGES_MAX = 5
JSON = {"content-type": "application/json"}
ARROW = JSON | {"accept": "application/vnd.apache.arrow.stream"}


class Group:
    """A cgroup with a memory limit, below the cgroup of this process or next to it."""

    def __init__(self, name, mib):
        for path, bound in self.places(f"sterling-{os.getpid()}-{name}"):
            with contextlib.suppress(OSError):
                path.mkdir()
                (path / bound).write_text(str(mib << 20))
                self.path, self.mib = path, mib
                return
            with contextlib.suppress(OSError):
                path.rmdir()
        sys.exit("cannot create a cgroup with a memory limit: this needs root and the memory controller, version 1 or 2")

    @staticmethod
    def places(name):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield Path(f"/sys/fs/cgroup/memory{path}") / name, "memory.limit_in_bytes"
            elif not controllers:
                # In version 2, a group with delegated controllers has no processes of its own.
                for above in (path, str(Path(path).parent)):
                    yield Path(f"/sys/fs/cgroup{above}") / name, "memory.max"

    @property
    def command(self):
        """Returns the command prefix that runs a command in the group."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    def kills(self):
        files = [self.path / name for name in ("memory.events", "memory.oom_control")]
        return int(re.search(r"^oom_kill (\d+)", next(file for file in files if file.exists()).read_text(), re.M)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        wait("the cgroup is empty", lambda: not (self.path / "cgroup.procs").read_text())
        self.path.rmdir()


def catalogue(path):
    """Publishes both models. Only few texts are distinct, so that answers are large although the columns are small."""
    generator = random.Random(SEED)
    texts = {width: [(f"{n} " + "lorem ipsum dolor " * (width // 18 + 1))[:width] for n in range(8)] for width in WIDTHS}
    mixed = [texts[64_000][n % 8][: int(4096 ** (n / 63)) - 1] for n in range(64)]
    for model, count in COUNTS.items():
        items = FOLDER / f"{model}.jsonl"
        with items.open("w") as file:
            for id in range(count):
                own = {"number": id % 1000, "tags": [f"tag{generator.randrange(50)}" for _ in range(id % 5)]}
                if model == "wide":
                    own |= {f"text{width}": generator.choice(some) for width, some in texts.items()}
                else:
                    own |= {"name": f"item {id}", "text": generator.choice(mixed)}
                file.write(json.dumps({"id": id, "embedding": vector(generator), "attributes": own}) + "\n")
        command = [STERLING, "publish", "--name", model, "--items", str(items), "--store", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        items.unlink()
    return path


def vector(generator):
    return [round(generator.uniform(-1, 1), 3) for _ in range(4)]


class Reader:
    """Sends random requests, one after another."""

    def __init__(self, number, name, address, key, counts, stop):
        self.random, self.name, self.address = random.Random(f"{SEED} {number}"), name, address
        self.counts, self.stop = counts, stop
        self.key = {"authorization": f"Bearer {key}"}
        self.connection = None

    def some(self, most):
        """Returns a number up to `most`, small or large with equal probability, and often the maximum."""
        return most if self.random.random() < 0.1 else int(math.exp(self.random.uniform(0, math.log(most + 0.999))))

    def retrieval(self, model):
        k = self.some(RESULTS_MAX)
        return {
            "vector": vector(self.random),
            "k": k,
            "candidates": min(CANDIDATES_MAX, k * self.random.choice([1, 1, 4])),
            "columns": self.random.sample(COLUMNS[model], self.random.randrange(len(COLUMNS[model]) + 1)),
            "timeout_ms": self.random.choice([1000, 60_000]),
        }

    def tensors(self, model):
        one, rows = self.retrieval(model), self.some(LIST_MAX)
        names = ["ids", "scores", *(f"columns.{column}" for column in one["columns"])]
        return {
            "parameters": {name: one[name] for name in ("k", "candidates", "timeout_ms")},
            "inputs": [{"name": "vector", "shape": [rows, 4], "datatype": "FP32", "data": one["vector"] * rows}],
            "outputs": [{"name": name, "parameters": {"binary_data": self.random.random() < 0.5}} for name in names],
        }

    def ranking(self, model):
        one = self.retrieval(model)
        ids = self.random.sample(range(COUNTS[model]), self.some(COUNTS[model]))
        return {name: one[name] for name in ("vector", "columns", "timeout_ms")} | {"items": ids}

    def request(self, form):
        """Returns method, path, body and headers of a request for an answer of this form."""
        model = self.random.choice(list(COLUMNS))
        column = self.random.choice([name for name in COLUMNS[model] if name != "number"])
        part = self.random.choice(["", "lorem", "0", "tag"])
        retrieve, either = f"/v1/models/{model}:retrieve", self.random.choice([JSON, ARROW])
        match form:
            case "json" | "arrow":
                return "POST", retrieve, self.retrieval(model), ARROW if form == "arrow" else JSON
            case "columns":
                return "POST", retrieve, self.retrieval(model) | {"format": "columns"}, JSON
            case "pages":
                return "POST", retrieve, self.retrieval(model) | {"cursor": ""}, either
            case "list":
                return "POST", retrieve, {"requests": [self.retrieval(model) for _ in range(self.some(LIST_MAX))]}, either
            case "rank":
                return "POST", f"/v1/models/{model}:rank", self.ranking(model), either
            case "tensors":
                return "POST", f"/v2/models/{model}/infer", self.tensors(model), JSON
            case "find":
                return "GET", f"/v1/models/{model}/items?contains={part}&column={column}&limit={self.some(100)}", None, {}
            case "values":
                return "GET", f"/v1/models/{model}/columns/{column}?contains={part}&limit={self.some(1000)}", None, {}

    def ask(self, form, method, path, body, headers):
        """Sends one request; returns the cursor of the next page, if there is one."""
        coding = self.random.choice([{}, {}, {"accept-encoding": "gzip"}, {"accept-encoding": "zstd"}])
        if self.connection is None:
            self.connection = http.client.HTTPConnection(self.address, timeout=120)
        self.connection.request(method, path, body and json.dumps(body), headers | coding | self.key)
        answer = self.connection.getresponse()
        pause, most = self.random.choice([(0, math.inf)] * 6 + [(0.02, math.inf), (0, self.some(64 << 20))])
        start, end, length = b"", b"", 0
        while length < most and not self.stop.is_set() and (piece := answer.read(64 << 10)):
            start, end, length = start or piece, piece, length + len(piece)
            # A slow reader is slow only for its first megabytes, so that there are many answers.
            time.sleep(pause if length < 8 << 20 else 0)
        self.counts[self.name, form, answer.status] += 1
        self.counts[self.name, form, "MB"] += length / 1e6
        if length >= most or self.stop.is_set():
            self.close()
        found = re.search(rb'"cursor":"([^"]+)"', start + end)
        return found and found[1].decode()

    def close(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def run(self):
        while not self.stop.is_set():
            form = self.random.choice(FORMS[self.name])
            method, path, body, headers = self.request(form)
            try:
                for _ in range(PAGES_MAX):
                    cursor = self.ask(form, method, path, body, headers)
                    if not cursor or self.stop.is_set():
                        break
                    body = body | {"cursor": cursor}
            except (OSError, http.client.HTTPException):
                self.counts[self.name, form, "cut"] += 1
                self.close()
                # Limits the request rate at a process that has died.
                time.sleep(0.1)


def attack(addresses, key, stop, found):
    """Runs readers against each address."""
    counts = collections.Counter()
    several = itertools.islice(itertools.cycle(addresses.items()), CONNECTIONS)
    readers = [Reader(number, *each, key, counts, stop) for number, each in enumerate(several)]
    threads = [threading.Thread(target=reader.run, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    stop.wait()
    for thread in threads:
        thread.join(5)
    found.send(dict(counts))


def small(server, key, requests, when):
    """Runs the small requests of another caller: returns the p99 and the number of unanswered requests."""
    line = bench(server.url, "--key", key, "--model", "many", "--requests", requests, "--rate", RATE, "--seconds", seconds(120))[0]["classes"][0]
    times = line["answered_ms"] or {"p50": math.inf, "p99": math.inf}
    row(when, line["requests"], line["ok"], times["p50"], times["p99"])
    return times["p99"], line["requests"] - line["ok"]


def served(server, key):
    """Returns the names of the models that the server has loaded."""
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        return {model["name"] for model in json.loads(connection.getresponse().read())["models"]}


def peak_mib(server):
    with contextlib.suppress(OSError, TypeError):
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[1]) >> 10
    return math.inf


def tell(counts):
    """Prints a row for each form and process, and whether the run covered the required cases."""
    header("process", "form", "200", "422", "503", "504", "other", "cut", "MB")
    others, unmet = 0, []
    for name, form in ((name, form) for name, forms in FORMS.items() for form in forms):
        of = {what: count for (*which, what), count in counts.items() if which == [name, form]}
        usual = [of.pop(status, 0) for status in (200, 422, 503, 504)]
        cut, megabytes = of.pop("cut", 0), of.pop("MB", 0.0)
        others += sum(of.values())
        row(name, form, *usual, sum(of.values()), cut, megabytes)
        if usual[0] == 0:
            unmet.append(f"{form} of the {name}")
    verdict(not unmet, f"answers of every form were received, missing: {', '.join(unmet) or 'none'}")
    verdict(others == 0, f"{others} answers with another status, expected 0")


def main():
    path, key = keys("attacker", "other", "router")
    guarded = {"STERLING_ACCESS__KEYS": path}
    folder = FOLDER / "store"
    folder.mkdir()
    catalogue(folder)
    output = subprocess.run([STERLING, "serve", "--check", "--store", str(folder)], stdout=subprocess.PIPE, text=True, check=True).stdout
    advised = int(re.search(r"^memory: (\d+) MiB", output, re.M)[1])
    advised_router = 2 * int(os.environ.get("STERLING_HTTP__BODIES_MB", 256)) + PROGRAM_MB
    body = {"k": 10, "columns": ["name"], "timeout_ms": 10_000}
    requests = requests_file("small", [body | {"vector": vector(random.Random(n))} for n in range(500)])
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(Group(name, mib)) for name, mib in (("server", advised), ("router", advised_router))]
        server = stack.enter_context(Server(STERLING, folder, environment=guarded).within(groups[0]))
        neighbour = stack.enter_context(Server(STERLING, folder, environment=guarded))
        router = stack.enter_context(Router([server], guarded | {"STERLING_ROUTE__KEY": key["router"]}).within(groups[1]))
        processes = {"server": server, "router": router}
        for one in (server, neighbour):
            wait("both models are served", lambda: served(one, key["other"]) == set(COLUMNS))
            bench(one.url, "--key", key["other"], "--model", "many", "--requests", requests, "--rate", RATE, "--seconds", 2)
        header("small requests", "requests", "answered", "p50 ms", "p99 ms")
        alone, _ = small(server, key["other"], requests, "alone")
        addresses = {name: process.address for name, process in processes.items()}
        with beside(attack, addresses, key["attacker"]) as counts:
            p99, lost = small(server, key["other"], requests, "beside the readers")
            small(neighbour, key["other"], requests, "at an unused server")
        tell(counts)
        header("process", "advised MiB", "peak MiB")
        for (name, process), group in zip(processes.items(), groups):
            peak = peak_mib(process)
            row(name, group.mib, peak)
            is_there = process.process.poll() is None and group.kills() == 0
            verdict(is_there, f"{name}: {group.kills()} processes killed because memory ran out, {'runs' if is_there else 'is gone'}")
            verdict(peak < group.mib, f"{name}: peak {peak} MiB, expected less than the advised {group.mib} MiB")
        verdict(lost == 0, f"{lost} small requests of another caller at the server were not answered, expected 0")
        verdict(p99 <= 3 * alone, f"p99 of small requests {p99:.1f} ms, {p99 / alone:.1f} x of alone, expected at most 3 x")
    finish()


main()
