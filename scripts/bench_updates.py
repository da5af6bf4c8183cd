#!/usr/bin/env python3
"""Measures updates of items while requests are answered.

    STERLING=... DATA=folder [ITEMS=200000] [SECONDS=15] scripts/bench_updates.py PART...

Parts: lag (acknowledgement to visibility), stream_lag (that lag over a stream, at the server that received the write and at
another server; NATS_SERVER is the broker, SYNC=always makes it sync each message, from version 2.10 on), cost (CPU time of the
server for sustained writes alone, compared with PEER), rates (sustained writes at half of the saturation load), fresh (a delta of
5 % compared with a full publication), new_kinds (recall while items of a new kind are added one by one and in bulk), turnover
(half of the items replaced and merged, compared with a fresh build), merge (effect of a merge on requests), busy (that effect, and
the duration of the merge, while other processes use every core), recovery (a start with a journal of a million records). DATA keeps vectors
and stores between runs. Needs numpy.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from served import FOLDER, STERLING, Server, bench, binaries, finish, header, median, quantile, requests_file, row, seconds, verdict, wait

DATA = Path(os.environ.get("DATA", FOLDER))
ITEMS = int(os.environ.get("ITEMS", 200_000))
WIDTH = 128
CENTRES = 2_000
K = 100
MODEL = "/v1/models/items"


def vectors(count, seed, centres=CENTRES, shift=0):
    """Returns unit vectors around centres, starting at index `shift`."""
    places = np.random.default_rng(1).standard_normal((CENTRES + 1000, WIDTH)).astype(np.float32)
    random = np.random.default_rng(seed)
    rows = places[shift + random.integers(0, centres, count)]
    rows = rows + 0.7 * random.standard_normal((count, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def published(name, ids, rows, position=0):
    """Returns a store with a version of these items."""
    path = DATA / name
    if not (path / "items").exists():
        np.save(FOLDER / "rows.npy", rows)
        lines = (f'{{"id": {i}, "attributes": {{"stock": 1, "kind": ["k{i % 50}"]}}}}\n' for i in ids)
        (FOLDER / "items.jsonl").write_text("".join(lines))
        command = [STERLING, "publish", "--name", "items", "--items", FOLDER / "items.jsonl", "--vectors", FOLDER / "rows.npy"]
        command += ["--store", path, "--position", position]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def base():
    return published(f"base-{ITEMS}", range(ITEMS), vectors(ITEMS, 2))


def copied(store, name):
    """Copies a store, so that a run may publish to it."""
    to = FOLDER / name
    shutil.copytree(store, to, copy_function=os.link)
    return to


def serving(store, name, share="0"):
    return Server(STERLING, store, "--updates", FOLDER / name, environment={"STERLING_MERGE__SHARE": share})


def requests(count=1000, seed=3):
    return [{"vector": [round(float(x), 5) for x in row], "k": K} for row in vectors(count, seed)]


def put_bodies(ids, rows, size):
    text = [
        f'{{"id": {i}, "embedding": {json.dumps([round(float(x), 5) for x in row])}, "attributes": {{"stock": 2, "kind": ["k1"]}}}}'
        for i, row in zip(ids, rows)
    ]
    return ['{"items": [' + ", ".join(text[n : n + size]) + "]}" for n in range(0, len(text), size)]


def set_bodies(count, size, among):
    return [
        '{"items": [' + ", ".join(f'{{"id": {(n + i) % among}, "set": {{"stock": {n + i}}}}}' for i in range(size)) + "]}"
        for n in range(0, count, size)
    ]


def post(server, connection, body, path=f"{MODEL}/items:upsert"):
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        sys.exit(f"{path}: {answer.status} {text[:300]}")
    told = json.loads(text)
    if told.get("refused"):
        sys.exit(f"{path}: rejected {told['refused'][:2]}")
    return told


def see(connection, position):
    connection.request("GET", f"{MODEL}/items:position?min_position={position}")
    answer = connection.getresponse()
    text = answer.read()
    return json.loads(text) if answer.status == 200 else None


def state(server):
    return json.loads(server.get(f"{MODEL}/items:position")[1])


def settle(server):
    durable = state(server)["durable"]
    wait("all updates are visible", lambda: state(server)["position"] >= durable)


def recall(server, count=300, **more):
    """Returns the mean recall@K of the default search, or of a search with the fields `more`, over the same queries each time."""
    found, asked = [], requests(count, 4)
    for n in range(0, count, 50):
        both = []
        for extra in ({"exact": True}, more):
            status, told = server.post(f"{MODEL}:retrieve", {"requests": [body | extra for body in asked[n : n + 50]]})
            assert status == 200, told
            both.append([{item["id"] for item in one["items"]} for one in told["results"]])
        found += [len(truth & got) / K for truth, got in zip(*both)]
    return sum(found) / len(found)


def lists(store, version):
    """Returns the length of the longest list of a version, as a multiple of the mean."""
    with open(store / "items" / str(version) / "index.safetensors", "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        place = json.loads(file.read(size))["list_lengths"]["data_offsets"]
        file.seek(8 + size + place[0])
        lengths = np.frombuffer(file.read(place[1] - place[0]), np.uint32)
    return len(lengths), lengths.max() / lengths.mean()


def peak(server, asked):
    return bench(server.url, "--requests", asked, "--find-peak", "--rate", 500, "--seconds", 3)[-1]["peak"]["rate"]


def load(server, asked, rate, lasts):
    return bench(server.url, "--requests", asked, "--rate", rate, "--seconds", lasts)[0]["classes"][0]


def latency(report, name):
    return report["answered_ms"][name]


def lag():
    with serving(copied(base(), "lag"), "lag-updates") as server:
        connection, times, acks = server.connect(), [], []
        for n in range(600):
            start = time.perf_counter()
            position = post(server, connection, put_bodies([n], vectors(1, n), 1)[0])["position"]
            acknowledged = time.perf_counter()
            see(connection, position)
            times.append((time.perf_counter() - acknowledged) * 1e3)
            acks.append((acknowledged - start) * 1e3)
        header("", "p50 ms", "p99 ms")
        row("acknowledgement", median(acks), quantile(acks, 0.99))
        row("acknowledged to visible", median(times), quantile(times, 0.99))
        verdict(quantile(times, 0.99) <= 20, "acknowledged to visible, p99 at most 20 ms")


class Broker:
    """A NATS broker in its own folder; ends with the `with` block."""

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        sync = f", sync_interval: {os.environ['SYNC']}" if "SYNC" in os.environ else ""
        (FOLDER / "broker.conf").write_text(
            f'listen: 127.0.0.1:{self.port}\njetstream {{ store_dir: "{FOLDER}/streams"{sync} }}\n'
        )
        command = [os.environ.get("NATS_SERVER", "nats-server"), "-c", str(FOLDER / "broker.conf")]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait("the broker answers", self.answers)
        return self

    def answers(self):
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def stream_lag():
    with Broker() as broker:
        more = ["--updates", f"nats://127.0.0.1:{broker.port}"]
        share = {"STERLING_MERGE__SHARE": "0"}
        one = Server(STERLING, copied(base(), "stream-one"), *more, environment=share)
        two = Server(STERLING, copied(base(), "stream-two"), *more, environment=share)
        header("seen at", "written at", "acknowledgement p50 ms", "p99 ms", "to visible p50 ms", "p99 ms")
        with one, two:
            for name, write, read in [("the same server", [one], one), ("another one", [one], two), ("one of both", [one, two], two)]:
                writers, reader, times, acks = [server.connect() for server in write], read.connect(), [], []
                for n in range(600):
                    start = time.perf_counter()
                    at = n % len(writers)
                    position = post(write[at], writers[at], put_bodies([n], vectors(1, n), 1)[0])["position"]
                    acknowledged = time.perf_counter()
                    see(reader, position)
                    times.append((time.perf_counter() - acknowledged) * 1e3)
                    acks.append((acknowledged - start) * 1e3)
                row(name, len(write), median(acks), quantile(acks, 0.99), median(times), quantile(times, 0.99))
                verdict(quantile(times, 0.99) <= 50, f"acknowledged to visible at {name}, p99 at most 50 ms")


def writing(server, bodies, rate, size, stop, done):
    """Sends bodies at a rate over one connection; `done` receives the number of updates, the lag and the time from
    acknowledgement to visibility."""
    connection, seen, start = server.connect(), server.connect(), time.perf_counter()
    for n, body in enumerate(bodies):
        if stop.is_set():
            break
        time.sleep(max(0, start + n * size / rate - time.perf_counter()))
        position = post(server, connection, body)["position"]
        done["updates"] += size
        done["seconds"] = time.perf_counter() - start
        if n % 5 == 0:
            asked = time.perf_counter()
            told = see(seen, position)
            done["visible"].append((time.perf_counter() - asked) * 1e3 if told else 1e9)


def kinds(lasts):
    """Returns the kinds of writes: name, rate, bodies, updates per body."""
    count = int(3_200 * lasts) // 100 * 100
    items = put_bodies(np.arange(count) % (ITEMS // 8) + ITEMS, vectors(count, 7), 100)
    return [
        ("attribute changes", 10_000, set_bodies(int(10_500 * lasts), 250, ITEMS // 10), 250),
        ("whole items", 3_000, items, 100),
    ]


def cost():
    store, lasts = base(), seconds(15)
    header("writes", "binary", "done /s", "cores", "us each", "visible p50 ms", "p99 ms")
    for what, rate, bodies, size in kinds(lasts):
        for name, binary in binaries().items():
            at = f"{name}-{what.replace(' ', '-')}"
            environment = {"STERLING_MERGE__SHARE": "0"}
            with Server(binary, copied(store, at), "--updates", FOLDER / f"{at}-updates", environment=environment) as server:
                done, before, start = {"updates": 0, "seconds": 1, "visible": []}, server.stat()[1], time.perf_counter()
                writing(server, bodies[: int(rate * lasts) // size], rate, size, threading.Event(), done)
                settle(server)
                took, lasted, seen = server.stat()[1] - before, time.perf_counter() - start, done["visible"]
                row(what, name, done["updates"] / done["seconds"], took / lasted, 1e6 * took / done["updates"], median(seen), quantile(seen, 0.99))


def rates():
    store, lasts = base(), seconds(15)
    asked = requests_file("asked", requests())
    header("writes", "target /s", "done /s", "visible p50 ms", "p99 ms", "requests /s", "p99 without", "p99 with", "ratio")
    for what, rate, bodies, size in kinds(lasts):
        with serving(copied(store, what.replace(" ", "-")), f"{what[:4]}-updates") as server:
            half = float(os.environ.get("PEAK", 0)) or peak(server, asked)
            half /= 2
            load(server, asked, half, 3)
            alone = load(server, asked, half, lasts)
            done, stop = {"updates": 0, "seconds": 1, "visible": []}, threading.Event()
            writer = threading.Thread(target=writing, args=(server, bodies, rate, size, stop, done))
            writer.start()
            beside = load(server, asked, half, lasts)
            stop.set()
            writer.join()
            settle(server)
            again = load(server, asked, half, min(lasts, 8))
            without = min(latency(alone, "p99"), latency(again, "p99"))
            got, ratio = done["updates"] / done["seconds"], latency(beside, "p99") / without
            seen = done["visible"]
            row(what, rate, got, median(seen), quantile(seen, 0.99), half, without, latency(beside, "p99"), ratio)
            verdict(got >= 0.98 * rate, f"{what}: {rate}/s sustained")
            verdict(ratio <= 1.5, f"{what}: p99 of requests at most 1.5 x")


def fresh():
    rows, beside = vectors(ITEMS, 2), ITEMS // 20
    part = published(f"part-{ITEMS}", range(ITEMS - beside), rows[: ITEMS - beside])
    asked = requests_file("asked", requests())
    with serving(copied(part, "fresh"), "fresh-updates") as server, Server(STERLING, base()) as whole:
        connection = server.connect()
        for body in put_bodies(range(ITEMS - beside, ITEMS), rows[ITEMS - beside :], 500):
            post(server, connection, body)
        settle(server)
        found = [recall(one) for one in (server, whole)]
        times = [[], []]
        for _ in range(3):
            for one, into in zip((server, whole), times):
                into.append(latency(load(one, asked, 100, 4), "p50"))
        p50 = [median(one) for one in times]
        header("", "recall@100", "p50 ms")
        row(f"{beside} of {ITEMS} fresh", f"{found[0]:.4f}", p50[0])
        row("published", f"{found[1]:.4f}", p50[1])
        verdict(found[1] - found[0] <= 0.003, "recall within 0.003 of a full publication")
        verdict(p50[0] <= 1.15 * p50[1], f"p50 at most 1.15 x: {p50[0] / p50[1]:.2f}")


def turnover():
    store, part = copied(base(), "turnover"), ITEMS // 10
    ids, rows = np.arange(ITEMS), vectors(ITEMS, 2)
    header("replaced", "merge s", "lists", "longest / mean", "recall@100", f"at {64} lists")
    with serving(store, "turnover-updates") as server:
        connection = server.connect(600)
        for n in range(5):
            # A third of the new items lies in regions without items.
            new = np.concatenate([vectors(part - part // 3, 10 + n), vectors(part // 3, 20 + n, 300, CENTRES + 150 * n)])
            gone = slice(n * part, (n + 1) * part)
            body = json.dumps({"ids": ids[gone].tolist()})
            post(server, connection, body, f"{MODEL}/items:delete")
            ids[gone], rows[gone] = np.arange(part) + ITEMS * (n + 2), new
            for body in put_bodies(ids[gone], new, 500):
                post(server, connection, body)
            settle(server)
            start = time.perf_counter()
            version = post(server, connection, "", f"{MODEL}/items:merge")["version"]
            took = time.perf_counter() - start
            count, longest = lists(store, version)
            kept = recall(server), recall(server, probes=64)
            row(f"{10 * (n + 1)} %", took, count, longest, f"{kept[0]:.4f}", f"{kept[1]:.4f}")
            worst = longest if n == 0 else max(worst, longest)
    anew = published("anew", ids, rows) if not (DATA / "anew").exists() else DATA / "anew"
    with Server(STERLING, anew) as server:
        fresh_recall = recall(server), recall(server, probes=64)
        count, longest = lists(anew, 1)
        row("rebuilt", "", count, longest, f"{fresh_recall[0]:.4f}", f"{fresh_recall[1]:.4f}")
    shutil.rmtree(anew, ignore_errors=True)
    verdict(worst <= 4, "no list above 4 x the mean")
    verdict(fresh_recall[0] - kept[0] <= 0.005, "recall within 0.005 of a fresh build")
    verdict(fresh_recall[1] - kept[1] <= 0.005, "recall at equal lists within 0.005 of a fresh build")


def new_kinds():
    """Measures two geometries; rows of a kind have small numbers in one half of the dimensions, which distinguishes old from new rows."""
    most, each, asked_for = ITEMS // 10, 20, 0.98
    random = np.random.default_rng(77)
    centres = {"old": random.standard_normal((200, WIDTH)), "new": random.standard_normal((10, WIDTH))}

    def drawn(kind, count, is_unit):
        rows = centres[kind][random.integers(0, len(centres[kind]), count)] + 0.3 * random.standard_normal((count, WIDTH))
        rows[:, slice(0, WIDTH // 2) if kind == "new" else slice(WIDTH // 2, WIDTH)] *= 0.1
        if is_unit:
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows.astype(np.float16).astype(np.float32)

    def found(server, queries, rows):
        """Returns the mean recall of the default search among `rows`, whose ids are their indexes; an equal score counts as a
        hit."""
        connection, got = server.connect(), []
        for query in queries:
            status, told = server.post(f"{MODEL}:retrieve", {"vector": query.tolist(), "k": each}, connection)
            assert status == 200, told
            scores = rows @ query
            got.append(np.mean(scores[[item["id"] for item in told["items"]]] >= np.partition(scores, -each)[-each] - 1e-3))
        connection.close()
        return float(np.mean(got))

    def p50(server, queries):
        connection, times = server.connect(), []
        for query in np.concatenate([queries] * 6):
            start = time.perf_counter()
            server.post(f"{MODEL}:retrieve", {"vector": query.tolist(), "k": each}, connection)
            times.append((time.perf_counter() - start) * 1e3)
        connection.close()
        return median(times)

    header("rows", "put", "new", "recall, new", "recall, old", "p50 old, of none", "p50 new ms", "updates/s")
    for is_unit in (False, True):
        old, fresh = drawn("old", ITEMS, is_unit), drawn("new", most, is_unit)
        asked = {kind: drawn(kind, 100, is_unit) for kind in centres}
        geometry = "unit" if is_unit else "gaussian"
        part = published(f"kinds-{geometry}-{ITEMS}", range(ITEMS), old)
        for size in (1, 1000):
            name, at = f"kinds-{geometry}-{size}", 0
            # Above 100,000 items, updates of single items stop at 0.1 % new items, because more would take long.
            shares = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1] if size > 1 or ITEMS <= 100_000 else [0.0002, 0.001]
            with serving(copied(part, name), f"{name}-updates") as server:
                connection = server.connect(600)
                before, alone = found(server, asked["old"], old), p50(server, asked["old"])
                lowest = [1.0, 1.0]
                # Recall of queries for new items, before any new item exists.
                row(geometry, "none", 0, f"{found(server, asked['new'], old):.3f}", f"{before:.3f}", 1.0, p50(server, asked["new"]), "")
                for share in shares:
                    until, start = int(ITEMS * share), time.perf_counter()
                    for body in put_bodies(range(ITEMS + at, ITEMS + until), fresh[at:until], size):
                        position = post(server, connection, body)["position"]
                    rate = (until - at) / (time.perf_counter() - start)
                    # A call waits as long as a request may take; on a busy machine the updates may take longer.
                    wait("the updates are visible", lambda: see(connection, position))
                    at, rows = until, np.vstack([old, fresh[:until]])
                    of_new, of_old = (found(server, asked[kind], rows) for kind in ("new", "old"))
                    lowest = [min(lowest[0], of_new), min(lowest[1], of_old - before)]
                    took = p50(server, asked["old"]) / alone
                    row(geometry, "one by one" if size == 1 else f"by {size}", at, f"{of_new:.3f}", f"{of_old:.3f}", took, p50(server, asked["new"]), rate)
                    if share == 0.05:
                        verdict(took <= 1.15, f"{geometry}, {size} at once: p50 of old queries with 5 % fresh at most 1.15 x: {took:.2f}")
                post(server, connection, "", f"{MODEL}/items:merge")
                of_new, of_old = (found(server, asked[kind], rows) for kind in ("new", "old"))
                lowest = [min(lowest[0], of_new), min(lowest[1], of_old - before)]
                row(geometry, "merged", at, f"{of_new:.3f}", f"{of_old:.3f}", p50(server, asked["old"]) / alone, p50(server, asked["new"]), "")
                verdict(lowest[0] >= asked_for - 0.02, f"{geometry}, {size} at once: lowest recall of new items at any moment: {lowest[0]:.3f}")
                verdict(lowest[1] >= -0.005, f"{geometry}, {size} at once: change of the recall of old items: {lowest[1]:+.3f}")


def merge():
    asked, lasts = requests_file("asked", requests()), seconds(15)
    with serving(copied(base(), "merge"), "merge-updates") as server:
        saturation = float(os.environ.get("PEAK", 0)) or peak(server, asked)
        connection = server.connect()
        for body in put_bodies(range(ITEMS, ITEMS + ITEMS // 20), vectors(ITEMS // 20, 5), 500):
            post(server, connection, body)
        settle(server)
        load(server, asked, saturation / 4, 3)
        header("of saturation", "requests /s", "p99 without", "p99 with merges", "merges", "ratio")
        ratios = {}
        for _ in range(3):
            for part in (0.25, 0.5):
                rate = saturation * part
                alone, stop, merges = load(server, asked, rate, lasts), threading.Event(), []

                def merging():
                    own = server.connect(600)
                    while not stop.is_set():
                        start = time.perf_counter()
                        post(server, own, "", f"{MODEL}/items:merge")
                        merges.append(time.perf_counter() - start)

                thread = threading.Thread(target=merging)
                thread.start()
                beside = load(server, asked, rate, lasts)
                stop.set()
                thread.join()
                if not merges:
                    sys.exit("no merge finished during the load")
                ratios.setdefault(part, []).append(latency(beside, "p99") / latency(alone, "p99"))
                times = ", ".join(f"{took:.1f} s" for took in merges)
                row(part, rate, latency(alone, "p99"), latency(beside, "p99"), times, ratios[part][-1])
        for part, found in ratios.items():
            verdict(median(found) <= 1.3, f"a merge costs a request at most 1.3 x its p99, at {part} of saturation: {median(found):.2f}")


@contextlib.contextmanager
def burning(count):
    """Runs busy processes during the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def busy():
    """Runs one busy process per core during all loads and merges."""
    asked, lasts, burners = requests_file("asked", requests()), seconds(10), len(os.sched_getaffinity(0))
    with serving(copied(base(), "busy"), "busy-updates") as server, burning(burners):
        rate = (float(os.environ.get("PEAK", 0)) or peak(server, asked)) / 4
        header("requests /s", "p99 without", "p99 beside the merge, per load", "merge s", "ratio")
        ratios, merges = [], []
        for round in range(3):
            # A connection that is idle for the time of a merge is closed.
            connection = server.connect(600)
            for body in put_bodies(range(ITEMS, ITEMS + ITEMS // 20), vectors(ITEMS // 20, 5 + round), 500):
                post(server, connection, body)
            settle(server)
            load(server, asked, rate, 3)
            alone, beside = latency(load(server, asked, rate, lasts), "p99"), []

            def merging():
                start = time.perf_counter()
                post(server, server.connect(600), "", f"{MODEL}/items:merge")
                merges.append(time.perf_counter() - start)

            thread = threading.Thread(target=merging)
            thread.start()
            while thread.is_alive():
                beside.append(latency(load(server, asked, rate, lasts), "p99"))
            thread.join()
            ratios.append(median(beside) / alone)
            row(rate, alone, ", ".join(f"{p99:.1f}" for p99 in beside), merges[-1], ratios[-1])
        verdict(max(merges) <= 60, f"a merge of 5 % ends within 60 s beside {burners} busy processes: {max(merges):.1f} s")
        verdict(median(ratios) <= 1.3, f"the merge costs requests at most 1.3 x their p99: {median(ratios):.2f}")


def recovery():
    store = copied(base(), "recovery")
    with serving(store, "recovery-updates") as server:
        connection, start = server.connect(), time.perf_counter()
        for body in set_bodies(1_000_000, 10_000, ITEMS // 4):
            post(server, connection, body)
        took = time.perf_counter() - start
    start = time.perf_counter()
    with serving(store, "recovery-updates") as server:
        durable = state(server)["durable"]
        wait("all updates are visible", lambda: state(server)["position"] == durable)
        again = time.perf_counter() - start
    header("records", "written s", "a start s")
    row(durable, took, again)
    verdict(again <= 10, "a start with a million records takes 10 s at most")


PARTS = {one.__name__: one for one in (lag, stream_lag, cost, rates, fresh, new_kinds, turnover, merge, busy, recovery)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        print(f"\n{part}", flush=True)
        PARTS[part]()
    finish()
