"""Runs the ``sterling`` program from Python: publishes a package, serves a store."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .errors import ProgramError, RequestError

Path = str | os.PathLike[str]


def find_program(program: Path | None = None, *, required: bool = True) -> pathlib.Path | None:
    """Returns the ``sterling`` program: the argument, else ``$STERLING``, else the program on ``PATH``.

    Raises `ProgramError` if it is ``required`` and not found.
    """
    given = program or os.environ.get("STERLING")
    found = shutil.which(given or "sterling")
    if found:
        return pathlib.Path(found)
    if given or required:
        where = f"`{given}` is no program" if given else "it is not on PATH"
        make = "`cargo build --profile quick` in the clone makes target/quick/sterling, which `pip install ./python` then includes"
        raise ProgramError(f"the program `sterling` is needed and {where}; {make}")
    return None


@dataclass(frozen=True)
class Published:
    """A published version. ``folder`` can be opened with `load_snapshot`; if the store is a bucket, there is no folder on this
    machine."""

    name: str
    version: int
    folder: pathlib.Path | None
    said: str


def publish(package: Path, store: Path, *, items: Path | None = None, index: Path | None = None, program: Path | None = None) -> Published:
    """Publishes a model package with its items and returns the version.

    ``items`` is an item file (``docs/guide/items.md``); the default is ``items.parquet`` or ``items.jsonl`` of the package.
    ``index`` is an index recipe. Raises `ProgramError` with the output of the program.
    """
    package, store = pathlib.Path(package), os.fspath(store)
    command = [str(find_program(program)), "publish", str(package), "--store", store]
    command += ["--items", str(items)] if items else []
    command += ["--index", str(index)] if index else []
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace")
    found = re.search(r"^published (.+) version (\d+):", done.stdout, re.MULTILINE)
    if done.returncode != 0 or not found:
        raise ProgramError(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-4000:]}")
    name, version = found[1], int(found[2])
    folder = None if "://" in store else pathlib.Path(store) / name / str(version)
    return Published(name, version, folder, done.stdout.strip())


def train(
    package: Path,
    events: Path | Sequence[Path],
    out: Path,
    *,
    items: Path | None = None,
    epochs: int = 1,
    shuffle: int = 0,
    seed: int = 1,
    threads: int = 1,
    work: Path | None = None,
    program: Path | None = None,
) -> dict[str, Any]:
    """Trains a model package on events (``docs/guide/train.md``), writes the package ``out`` and returns the report of the program.

    ``events`` are files or folders of JSON lines or Parquet. In the report ``learned``, ``frozen`` and ``popularity`` have ``ndcg@10``
    and ``hr@10`` over all events, each ranked before the training step on it. An interrupted run resumes from its last checkpoint.
    Checkpoints and rejected events are stored in ``work`` (default ``OUT.train``). Raises `ProgramError` with the output of the
    program.
    """
    paths = [events] if isinstance(events, (str, os.PathLike)) else events
    command = [str(find_program(program)), "train", os.fspath(package), "--events", *map(os.fspath, paths), "--out", os.fspath(out)]
    command += ["--epochs", str(epochs), "--shuffle", str(shuffle), "--seed", str(seed), "--threads", str(threads)]
    command += ["--items", os.fspath(items)] if items else []
    command += ["--work", os.fspath(work)] if work else []
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode != 0:
        raise ProgramError(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-4000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


class Server:
    """A running ``sterling serve``, started by `serve`. The server ends with the ``with`` block, or with `close`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: pathlib.Path):
        self._process, self.url, self._log = process, url, log

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def log(self) -> str:
        """Returns the log of the server so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, *, timeout: float = 60) -> Any:
        """Returns the JSON answer to a GET request."""
        return _answer(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 60) -> Any:
        """Returns the JSON answer to a body: ``server.post("/v1/models/shop:retrieve", {"vector": [0.5, 1.0]})``.

        Raises `RequestError` with the problem that the server answered.
        """
        data = json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return _answer(request, timeout)

    def close(self) -> None:
        """Terminates the process and waits for it; after ten seconds it is killed."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.unlink(missing_ok=True)


def serve(
    store: Path,
    *,
    program: Path | None = None,
    listen: str = "127.0.0.1:0",
    model: str | None = None,
    settings: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> Server:
    """Serves a store on a free port and returns once a model answers: ``model`` if it is set, else the first model that is loaded.

    ``settings`` are ``STERLING_*`` variables of the configuration, such as ``{"STERLING_ENGINE__WORKERS": "1"}``. Raises
    `ProgramError` with the log if the server ends or is not ready after ``timeout`` seconds.
    """
    command = [str(find_program(program)), "serve", "--store", str(store), "--listen", listen]
    command += ["--model", model] if model else []
    environment = {"STERLING_HTTP__DRAIN_MS": "0"} | dict(os.environ) | dict(settings or {})
    environment.pop("STERLING", None)
    descriptor, log = tempfile.mkstemp(prefix="sterling-", suffix=".log")
    with os.fdopen(descriptor, "wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    server = Server(process, "", pathlib.Path(log))
    try:
        server.url = _listening(process, timeout)
        _ready(server, process, timeout)
    except BaseException as e:
        said = server.log[-4000:].strip()
        server.close()
        if isinstance(e, ProgramError):
            raise ProgramError(f"{' '.join(command)}: {e}: {said}") from e
        raise
    return server


def _listening(process: subprocess.Popen[str], timeout: float) -> str:
    """Returns the address that the program prints first. Later output is read and dropped, so that the program never blocks on
    the pipe."""
    assert process.stdout is not None
    lines, found, said = process.stdout, threading.Event(), []

    def read() -> None:
        try:
            for line in lines:
                if not found.is_set() and (url := re.search(r"http://[^\s/]+", line)):
                    said.append(url[0])
                    found.set()
        except ValueError:
            pass  # The pipe was closed during the read: the server is being stopped.
        found.set()

    threading.Thread(target=read, daemon=True).start()
    if not found.wait(timeout):
        raise ProgramError(f"did not report its address within {timeout:g} s")
    if not said:
        raise ProgramError(f"ended with {process.wait()}")
    return said[0]


def _ready(server: Server, process: subprocess.Popen[str], timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            server.get("/readyz", timeout=5)
            return
        except RequestError as e:
            problem = str(e)
        except OSError as e:
            problem = str(e)
        if process.poll() is not None:
            raise ProgramError(f"ended with {process.returncode}")
        if time.monotonic() > end:
            raise ProgramError(f"is not ready after {timeout:g} s ({problem})")
        time.sleep(0.02)


#: The server runs on this machine, so the proxies of the environment are ignored.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answer(request: urllib.request.Request, timeout: float) -> Any:
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            body = answer.read()
    except urllib.error.HTTPError as e:
        with e:
            text = e.read().decode("utf-8", "replace")
        try:
            problem = json.loads(text)
        except ValueError:
            problem = {"detail": text}
        after = e.headers.get("Retry-After", "")
        raise RequestError(e.code, problem if isinstance(problem, dict) else {"detail": text}, float(after) if after.isdigit() else None) from None
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")
