#!/usr/bin/env python3
"""Servers over a stream, each in a network namespace, while servers and broker are killed and the network between them is cut.

STERLING=... [NATS_SERVER=nats-server] [FAULTS=60] [SYNC=always] scripts/chaos_streams.py, as root.

Two writers, one at each server, upsert new items one after another, and record the acknowledged items. FAULTS times, alternating and
only while both make progress, a server or the broker is killed (SIGKILL) and restarted, or the link of the broker to one server
or both drops every packet for up to twelve seconds. At the end both servers must have each acknowledged item once, at the same
position, and the position must count the items: no loss, no duplicate, no gap. SYNC=always needs a broker of version 2.10 or
later.
"""

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from spaces import STERLING, Process, Sterling, run, spaces, until

BROKER = os.environ.get("NATS_SERVER", "nats-server")
FAULTS = int(os.environ.get("FAULTS", 60))
SYNC = os.environ.get("SYNC", "")
FOLDER = Path(tempfile.mkdtemp(prefix="sterling-streams-"))
MODEL = "/v1/models/items"
NAMES = ["strl-broker", "strl-one", "strl-two"]
# Per server: its address on the link to the broker, the broker's address on that link, and its address for the writers.
LINKS = [("10.91.1.2", "10.91.1.1", "10.91.11.2"), ("10.91.2.2", "10.91.2.1", "10.91.12.2")]


def network(stack):
    """Creates a namespace for the broker and for each server; each server has a link to the broker and a link to the writers."""
    spaces(stack, NAMES, [f"strl-o{n}" for n in range(len(LINKS))])
    for n, (own, broker, outer) in enumerate(LINKS):
        space = NAMES[n + 1]
        run(f"ip link add strl-b{n} netns {NAMES[0]} type veth peer name strl-s{n} netns {space}")
        run(f"ip -n {NAMES[0]} addr add {broker}/24 dev strl-b{n}")
        run(f"ip -n {space} addr add {own}/24 dev strl-s{n}")
        run(f"ip link add strl-o{n} type veth peer name strl-i{n} netns {space}")
        run(f"ip addr add {outer[:-1]}1/24 dev strl-o{n}")
        run(f"ip -n {space} addr add {outer}/24 dev strl-i{n}")
        for where, link in [(NAMES[0], f"strl-b{n}"), (space, f"strl-s{n}"), (space, f"strl-i{n}")]:
            run(f"ip -n {where} link set {link} up")
        run(f"ip link set strl-o{n} up")


def cut(n, is_down):
    """Drops every packet between the broker and a server silently."""
    run(f"ip -n {NAMES[0]} link set strl-b{n} {'down' if is_down else 'up'}")


class Server(Sterling):
    def __init__(self, n):
        arguments = ["serve", "--store", FOLDER / f"store-{n}", "--updates", f"nats://{LINKS[n][1]}:4222"]
        super().__init__(NAMES[n + 1], LINKS[n][2], arguments)

    def is_ready(self):
        # A server that cannot reach its broker exits, and is restarted as by an orchestrator.
        if not self.is_running():
            self.start()
        return super().is_ready()


class Writer(threading.Thread):
    def __init__(self, n, server):
        super().__init__(daemon=True)
        self.n, self.server, self.is_over = n, server, False
        self.acknowledged, self.perhaps, self.last = [], [], "nothing yet"

    def run(self):
        count = 0
        while not self.is_over:
            count += 1
            item = 1000 + 2 * count + self.n
            body = {"items": [{"id": item, "embedding": [item % 97, 3], "attributes": {"n": item}}]}
            try:
                status, text = self.server.ask("POST", f"{MODEL}/items:upsert", body)
            except (OSError, http.client.HTTPException):
                status, text = 599, b""
            self.last = f"{status} {text[:300]}"
            if status == 200:
                self.acknowledged.append(item)
            elif status >= 500:
                self.perhaps.append(item)
                time.sleep(0.02)
            else:
                # The server exits; `progress` reports the reason.
                return


def progress(writers):
    before = [len(writer.acknowledged) for writer in writers]
    both = lambda: all(len(w.acknowledged) >= b + 5 for w, b in zip(writers, before))
    until("both write", both, detail=lambda: [(len(w.acknowledged) - b, w.is_alive(), w.last) for w, b in zip(writers, before)])


def fault(kind, broker, servers):
    if kind < 2:
        servers[kind].kill()
        servers[kind].start()
        until("the server is ready", servers[kind].is_ready)
    elif kind == 2:
        broker.kill()
        time.sleep(random.uniform(0, 2))
        broker.start()
    else:
        links = [[0], [1], [0, 1]][kind - 3]
        for n in links:
            cut(n, True)
        time.sleep(random.choice([0.3, 1.5, 4, 12]))
        for n in links:
            cut(n, False)


def hold(servers, writers):
    """Compares the items of the servers with the acknowledged items."""
    told = [json.loads(server.ask("GET", f"{MODEL}/items:position")[1]) for server in servers]
    durable = max(one["durable"] for one in told)
    acknowledged = {item for writer in writers for item in writer.acknowledged}
    perhaps = {item for writer in writers for item in writer.perhaps}
    for server in servers:
        until("all durable updates are visible", lambda: server.ask("GET", f"{MODEL}/items:position?min_position={durable}")[0] == 200)
        there, body = [], {"vector": [1, 1], "k": 50_000, "candidates": 200_000, "filter": "n > 0", "exact": True, "timeout_ms": 30_000}
        body["cursor"] = ""
        while "cursor" in body:
            status, text = server.ask("POST", f"{MODEL}:retrieve", body)
            answer = json.loads(text)
            assert status == 200 and answer["position"] == durable, (status, answer.get("position"), durable)
            there += [item["id"] for item in answer["items"]]
            body.pop("cursor")
            body |= {name: answer[name] for name in ["cursor"] if name in answer}
        there, count = set(there), len(there)
        assert count == len(there), "the pages contain an item twice"
        assert not acknowledged - there, f"{len(acknowledged - there)} of {len(acknowledged)} acknowledged items are missing, {count} exist"
        assert not there - acknowledged - perhaps, "items that no client has written"
        assert len(there) == durable, f"{len(there)} items by {durable} updates, expected as many: some exist twice"
    return len(acknowledged), durable - len(acknowledged), len(perhaps)


def main():
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, FOLDER, ignore_errors=True)
        network(stack)
        (FOLDER / "items.jsonl").write_text("".join(f'{{"id": {n}, "embedding": [{n}, 1], "attributes": {{"n": 0}}}}\n' for n in range(30)))
        for n in range(2):
            command = [STERLING, "publish", "--name", "items", "--items", FOLDER / "items.jsonl", "--store", FOLDER / f"store-{n}"]
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        sync = f", sync_interval: {SYNC}" if SYNC else ""
        (FOLDER / "broker.conf").write_text(f'listen: 0.0.0.0:4222\njetstream {{ store_dir: "{FOLDER}/streams"{sync} }}\n')
        version = re.search(r"v[\d.]+", subprocess.run([BROKER, "--version"], capture_output=True, text=True).stdout)[0]
        broker = Process(NAMES[0], [BROKER, "-c", FOLDER / "broker.conf"])
        stack.callback(lambda: broker.kill())
        time.sleep(1)
        servers = [Server(n) for n in range(2)]
        stack.callback(lambda: [server.kill() for server in servers])
        until("the servers are ready", lambda: all(server.is_ready() for server in servers))
        writers = [Writer(n, server) for n, server in enumerate(servers)]
        for writer in writers:
            writer.start()
        start, kinds = time.monotonic(), ["server killed", "other server killed", "broker killed", "one cut off", "the other cut off", "both cut off"]
        done = dict.fromkeys(kinds, 0)
        for n in range(FAULTS):
            progress(writers)
            fault(n % len(kinds), broker, servers)
            done[kinds[n % len(kinds)]] += 1
            until("the servers are ready", lambda: all(server.is_ready() for server in servers))
        progress(writers)
        for writer in writers:
            writer.is_over = True
        for writer in writers:
            writer.join()
        acknowledged, more, perhaps = hold(servers, writers)
        print(f"nats-server {version}, {FAULTS} faults in {time.monotonic() - start:.0f} s: " + ", ".join(f"{n} x {what}" for what, n in done.items()))
        print(f"{acknowledged} acknowledged updates, each stored once, at both servers; {more} of {perhaps} unacknowledged updates are stored, once")


if __name__ == "__main__":
    main()
