"""Measures a running `sterling demo`: python/evaluate_served.py [URL=http://127.0.0.1:8080]

Prints recall@20 of the held-out users' hidden packages, and recall@100 of the default probing relative to `exact`. Needs only
Python.
"""

import json
import sys
import urllib.request
from pathlib import Path

URL = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080") + "/v1/models/debian:retrieve"


def ids(user, **fields):
    body = {"features": user["features"], "exclude": user["exclude"], "timeout_ms": 60000, **fields}
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return [item["id"] for item in json.load(answer)["items"]]


def share(found, wanted, k):
    return len(set(found[:k]) & set(wanted)) / min(len(wanted), k)


def main():
    lines = (Path(__file__).parent.parent / "models/debian/heldout.jsonl").read_text().splitlines()
    users = [json.loads(line) for line in lines]
    mean = lambda shares: sum(shares) / len(users)
    defaults = mean([share(ids(user, k=20), user["held"], 20) for user in users])
    exact = mean([share(ids(user, k=20, candidates=2000, exact=True), user["held"], 20) for user in users])
    near = mean([share(ids(user, k=100, candidates=100), ids(user, k=100, candidates=100, exact=True), 100) for user in users])
    print(f"{len(users)} users: recall@20 {defaults:.4f} at defaults, {exact:.4f} exact; recall@100 of the probing {near:.4f}")


main()
