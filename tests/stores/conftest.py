"""Buckets of moto for all tests, each behind a proxy of its own."""

import collections.abc
import http.client
import os
import pathlib
import random
import re
import subprocess

import pytest
import sterling
from faults import Proxy, moto

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))


class Bucket:
    """A bucket of its own behind a proxy of its own, as the program finds it."""

    def __init__(self, moto_port: int, folder: pathlib.Path):
        self.moto, self.folder = moto_port, folder
        self.name = f"bucket-{random.getrandbits(48):x}"
        self.proxy = Proxy(moto_port)
        self.url = f"s3://{self.name}/models"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "STERLING"))} | {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secretsecret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_ALLOW_HTTP": "true",
            "STERLING_CACHE__FOLDER": str(folder / "cache"),
            "STERLING_REFRESH_MS": "200",
        }
        self.ask("PUT", "")

    def ask(self, method: str, key: str, body: bytes | None = None, **headers: str) -> bytes:
        """Asks the store itself, past the proxy."""
        store = http.client.HTTPConnection("127.0.0.1", self.moto, timeout=30)
        store.request(method, f"/{self.name}/{key}", body, {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"} | headers)
        answer = store.getresponse()
        content = answer.read()
        store.close()
        assert answer.status < 300, (method, key, answer.status, content)
        return content

    def keys(self) -> list[str]:
        return re.findall(r"<Key>models/([^<]+)</Key>", self.ask("GET", "?list-type=2&prefix=models/").decode())

    def run(self, *arguments: object, cache: str = "cache", expect: int = 0) -> str:
        """Runs the program to its end; what it said."""
        done = self.start(*arguments, cache=cache)
        out, err = done.communicate(timeout=120)
        assert done.returncode == expect, (arguments, done.returncode, out, err)
        return out + err

    def start(self, *arguments: object, cache: str = "cache") -> "subprocess.Popen[str]":
        environment = self.environment | {"STERLING_CACHE__FOLDER": str(self.folder / cache)}
        command = [str(argument) for argument in (PROGRAM, *arguments)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def publish(self, offset: int = 0, count: int = 400, *more: object, expect: int = 0) -> str:
        return self.run(*self.publication(offset, count), *more, expect=expect)

    def publication(self, offset: int, count: int, recipe: str = "[index]\nlists = 1\n") -> list[object]:
        """The arguments that publish a version whose files are others for each offset."""
        items, index = self.folder / f"items-{offset}.jsonl", self.folder / "recipe.toml"
        items.write_text("".join(f'{{"id": {n + offset}, "embedding": [{(n * 7 + offset) % count}, {n - count}, 1]}}\n' for n in range(count)))
        index.write_text(recipe)
        return ["publish", "--name", "vectors", "--items", items, "--index", index, "--store", self.url]

    def serve(self, cache: str = "cache of a server", **settings: str) -> sterling.Server:
        own = self.environment | {"STERLING_CACHE__FOLDER": str(self.folder / cache)} | settings
        return sterling.serve(self.url, program=PROGRAM, settings=own)


@pytest.fixture(scope="session")
def moto_port() -> collections.abc.Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def bucket(moto_port: int, tmp_path: pathlib.Path) -> collections.abc.Iterator[Bucket]:
    bucket = Bucket(moto_port, tmp_path)
    yield bucket
    bucket.proxy.down()
