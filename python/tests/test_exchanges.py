"""Requests and answers that the integration tests recorded (`TEST_EXCHANGES`, which scripts/test.sh sets) conform to
`/openapi.json`."""

import json
import os
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "tests/golden/openapi.json").read_text())
EXCHANGES = pathlib.Path(os.environ.get("TEST_EXCHANGES", ROOT / "target/exchanges"))


def fits(schema, cache={}):
    """Returns a validator of a schema of the document, which may refer to others in it."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    key = json.dumps(schema)
    if key not in cache:
        cache[key] = jsonschema_rs.validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "components": DOCUMENT["components"]})
    return cache[key]


def described(method, path):
    """Returns the operation of the document for a request: the one whose path has the fewest parameters."""
    path = path.split("?")[0]
    pattern = lambda template: re.sub(r"\\\{column\\\}", ".+", re.escape(template)) if "{column}" in template else re.escape(template)
    found = [
        template
        for template, calls in DOCUMENT["paths"].items()
        if method.lower() in calls and re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/:]+", pattern(template)), path)
    ]
    return DOCUMENT["paths"][min(found, key=lambda template: template.count("{"))][method.lower()] if found else None


def wrongs(exchange):
    """Returns the parts of a request and its answer that violate the document."""
    call = described(exchange["method"], exchange["path"])
    if call is None:
        if exchange["status"] < 300:
            yield "the document has no such call"
        return
    status, media_type = str(exchange["status"]), exchange["type"].split(";")[0]
    answer = call["responses"].get(status) or call["responses"].get("default")
    # Every call may get these errors: without a key, with too many requests, with an unreadable body.
    problem = {"content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    content = (answer or (problem if exchange["status"] >= 400 else {})).get("content", {})
    if media_type not in content:
        yield f"{status} has {sorted(content)}, got {media_type}"
    elif "json" in media_type and "ndjson" not in media_type:
        yield from (f"answer: {error}" for error in fits(content[media_type]["schema"]).iter_errors(json.loads(exchange["answer"])))
    # Some entries of an answered list may be invalid.
    is_wrong_in_part = '"problem":' in exchange["answer"] or '"refused":[{' in exchange["answer"]
    if exchange["status"] < 300 and exchange["body"] and "requestBody" in call and not is_wrong_in_part:
        schema = call["requestBody"]["content"]["application/json"]["schema"]
        try:
            body = json.loads(exchange["body"])
        except ValueError:
            return
        yield from (f"request: {error}" for error in fits(schema).iter_errors(body))


def test_what_the_integration_tests_asked_and_were_answered_fits():
    files = sorted(EXCHANGES.glob("*.jsonl"))
    if not files:
        pytest.skip("no exchanges: `TEST_EXCHANGES=FOLDER cargo test --test it` writes them")
    seen, wrong = set(), {}
    for file in files:
        for line in file.open():
            exchange = json.loads(line)
            call = (exchange["method"], re.sub(r"\d+", "0", exchange["path"]), exchange["status"])
            for why in wrongs(exchange):
                wrong.setdefault((*call, why[:300]), exchange)
            seen.add(call)
    assert not wrong, "\n".join(f"{call}: {exchange}"[:1200] for call, exchange in list(wrong.items())[:20])
    assert len(seen) > 100
