"""A proxy that injects one fault into every call of a program, and forwards its repetition."""

import collections
import contextlib
import http.server
import random
import re
import time
import urllib.parse

from faults import Proxy

STATUSES = {
    "429": (429, "SlowDown"),
    "500": (500, "InternalError"),
    "503": (503, "ServiceUnavailable"),
    "409": (409, "ConditionalRequestConflict"),
    "400 RequestTimeout": (400, "RequestTimeout"),
    "404 for a while": (404, "NoSuchKey"),
}
# Headers that make a write conditional; Google's is of its own.
CONDITIONS = ["If-Match", "If-None-Match", "x-goog-if-generation-match"]
FAULTS = [*STATUSES, "reset before", "reset after", "cut body", "flipped byte", "silence", "slow link"]
# Read timeout of the program, and silence of the proxy, in seconds.
PATIENCE, SILENCE = 1.0, 2.0
# Rate of a slow link in bytes per second, and its steps in bytes.
RATE, STEP = 60_000, 3000


class Table(Proxy):
    """Injects the fault into every other call with the same method and path: the first try and not the second."""

    fault: str | None = None

    def __init__(self, port: int):
        self.met: collections.Counter[tuple[str, str]] = collections.Counter()
        self.cases, self.bits = 0, random.Random(7)
        super().__init__(port)

    def begin(self, fault: str | None) -> None:
        with self.lock:
            self.fault = fault
            self.met.clear()

    def meets(self, asked: http.server.BaseHTTPRequestHandler) -> str | None:
        """Returns the fault of a call, if it gets one."""
        method, path = asked.command, re.sub(r"\.probe-\w+|uploadId=[^&]+", "", urllib.parse.unquote(asked.path))
        with self.lock:
            fault = self.fault
            reads = method in ("GET", "HEAD")
            fits = {
                None: False,
                "404 for a while": reads,
                "409": method == "PUT" and any(asked.headers.get(name) for name in CONDITIONS),
                "cut body": method == "GET",
                "flipped byte": method == "GET",
            }.get(fault, True)
            if not fits:
                return None
            call = (method, f"{path} {asked.headers.get('Range')}")
            self.met[call] += 1
            if fault != "slow link" and self.met[call] % 2 == 0:
                return None
            self.cases += 1
            return fault

    def hang_up(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            asked.connection.shutdown(2)
        asked.close_connection = True

    def answer(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        self.open.add(asked.connection)
        fault = self.meets(asked)
        body = self.body(asked, slowly=fault == "slow link")
        with self.lock:
            self.requests.append((asked.command, urllib.parse.unquote(asked.path)))
        if fault in STATUSES:
            status, code = STATUSES[fault]
            text = b"" if asked.command == "HEAD" else f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            return self.send(asked, status, {"content-type": "application/xml"}, text)
        if fault == "reset before":
            return self.hang_up(asked)
        if fault == "silence":
            self.closed.wait(SILENCE)
            return self.hang_up(asked)
        status, headers, content = self.pass_on(asked.command, asked.path, dict(asked.headers), body)
        if fault == "reset after":
            return self.hang_up(asked)
        if fault == "flipped byte" and content:
            content = bytearray(content)
            content[self.bits.randrange(len(content))] ^= 1 << self.bits.randrange(7)
        self.send(asked, status, headers, bytes(content), cut=fault == "cut body", slowly=fault == "slow link")

    def body(self, asked: http.server.BaseHTTPRequestHandler, slowly: bool) -> bytes:
        length, parts = int(asked.headers.get("Content-Length") or 0), []
        while length:
            parts.append(asked.rfile.read(min(length, STEP)))
            length -= len(parts[-1])
            if slowly:
                time.sleep(len(parts[-1]) / RATE)
        return b"".join(parts)

    def send(
        self, asked: http.server.BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, cut: bool = False, slowly: bool = False
    ) -> None:
        length = headers.get("content-length", "0") if asked.command == "HEAD" else str(len(content))
        cut = cut and len(content) > 0
        with contextlib.suppress(OSError):
            asked.send_response(status)
            for name, value in headers.items():
                if name not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    asked.send_header(name, value)
            asked.send_header("Content-Length", length)
            asked.end_headers()
            if asked.command != "HEAD":
                content = content[: len(content) // 2] if cut else content
                for start in range(0, len(content), STEP):
                    asked.wfile.write(content[start : start + STEP])
                    if slowly:
                        time.sleep(STEP / RATE)
        if cut:
            self.hang_up(asked)

