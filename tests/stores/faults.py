"""A reverse proxy in front of an object store that injects faults, and the stores themselves."""

import collections.abc
import contextlib
import dataclasses
import http.client
import http.server
import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.parse


@dataclasses.dataclass
class Fault:
    """Fault for requests with this method and prefix of the path, with the number of times."""

    method: str
    path: str
    action: str  # cut, flip, unavailable, denied, hold (until the proxy is closed)
    times: int = 1
    at: int = 0
    done: int = 0


class Proxy:
    """Forwards requests to a store, with injected faults; `down` closes it."""

    def __init__(self, port: int):
        self.store, self.faults, self.lock = port, [], threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.server: http.server.ThreadingHTTPServer | None = None
        self.port = 0
        self.up()

    def up(self) -> None:
        """Opens the proxy at its previous port."""
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_request(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

        http.server.ThreadingHTTPServer.allow_reuse_address = True
        self.open: set[socket.socket] = set()
        self.closed = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        """Closes the proxy, and all connections in the middle of their requests."""
        server, self.server = self.server, None
        if server:
            server.shutdown()
            server.server_close()
            self.closed.set()
            for connection in list(self.open):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def fault(self, *args: object, **kwargs: object) -> Fault:
        fault = Fault(*args, **kwargs)
        with self.lock:
            self.faults.append(fault)
        return fault

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.done < fault.times and fault.method == method and fault.path in path:
                    fault.done += 1
                    return fault
        return None

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Forwards a request to the store; returns the status, headers (with lower-case names) and content of its answer."""
        store = http.client.HTTPConnection("127.0.0.1", self.store, timeout=30)
        try:
            store.request(method, path, body, headers)
            answer = store.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            store.close()

    def answer(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        self.open.add(asked.connection)
        path = urllib.parse.unquote(asked.path)
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        fault = self.take(asked.command, path)
        if fault and fault.action in ("unavailable", "denied"):
            status, code = (503, "SlowDown") if fault.action == "unavailable" else (403, "AccessDenied")
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            asked.send_response(status)
            asked.send_header("Retry-After", "1")
            asked.send_header("Content-Length", str(len(text)))
            asked.end_headers()
            asked.wfile.write(text)
            return
        if fault and fault.action == "hold":
            self.closed.wait()
        # A request that was accepted during the closing is not forwarded.
        if self.closed.is_set() or (fault and fault.action == "cut" and asked.command == "PUT"):
            with contextlib.suppress(OSError):
                asked.connection.shutdown(socket.SHUT_RDWR)
            asked.close_connection = True
            return
        try:
            status, headers, content = self.pass_on(asked.command, asked.path, dict(asked.headers), body)
        except OSError:
            asked.close_connection = True
            return
        if fault and fault.action == "flip":
            content = bytearray(content)
            content[fault.at] ^= 1
        asked.send_response(status)
        for name, value in headers.items():
            if name not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                asked.send_header(name, value)
        asked.send_header("Content-Length", headers.get("content-length", "0") if asked.command == "HEAD" else str(len(content)))
        asked.end_headers()
        if asked.command != "HEAD":
            whole = fault.at if fault and fault.action == "cut" else len(content)
            with contextlib.suppress(OSError):
                asked.wfile.write(content[:whole])
            if whole < len(content):
                asked.connection.shutdown(socket.SHUT_RDWR)
                asked.close_connection = True


def free_port() -> int:
    """A port below those that the kernel gives to connections: one of these could take it before its server listens."""
    while True:
        port = random.randrange(12000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_for(what: str, is_so: collections.abc.Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)


@contextlib.contextmanager
def running(command: list[object], port: int, environment: dict[str, str] | None = None) -> collections.abc.Iterator[None]:
    """Runs a store on a port of this machine."""
    process = subprocess.Popen(
        [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )

    def answers() -> bool:
        assert process.poll() is None, f"{command} ended with {process.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(f"{command[0]}", answers)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def moto() -> collections.abc.Iterator[int]:
    """Runs the S3 of moto, which honours conditions; its state is in memory."""
    port = free_port()
    environment = dict(os.environ) | {"PYTHONPATH": ""}
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port], port, environment):
        yield port


@contextlib.contextmanager
def azurite(program: pathlib.Path, folder: pathlib.Path) -> collections.abc.Iterator[int]:
    """Runs the Azure of Azurite, which honours conditions."""
    port = free_port()
    place = ["--location", folder, "--blobHost", "127.0.0.1", "--blobPort", port]
    with running([program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", *place], port):
        yield port


@contextlib.contextmanager
def rclone(folder: pathlib.Path, program: str) -> collections.abc.Iterator[int]:
    """Runs the S3 of rclone, which ignores conditions."""
    port = free_port()
    (folder / "models").mkdir(parents=True)
    with running([program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "key,secretsecret", folder], port):
        yield port
