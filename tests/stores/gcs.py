"""fake-gcs-server's Google Cloud Storage, and a proxy for the writes of the XML API, which it lacks.

The program reads, lists, writes and deletes with Google's XML API. The emulator (1.54) supports its reads (ignoring
`If-Match`), listings in one page, and deletions. It supports writes by signed URLs only, and then ignores their conditions,
but it honours those of multipart uploads of the JSON API. `Translated` converts between the two: the emulator evaluates the
conditions, and the parts of large objects are assembled here."""

import collections.abc
import contextlib
import json
import pathlib
import threading
import urllib.parse

from faults import Proxy, free_port, running

CONDITION = "x-goog-if-generation-match"
Answer = tuple[int, dict[str, str], bytes]


class Translated(Proxy):
    """Translates writes of the XML API for the emulator: with their conditions; signed, without them; or, bare, unchanged."""

    def __init__(self, port: int):
        self.is_signed = self.is_bare = False
        self.parts: dict[str, dict[int, bytes]] = {}
        self.parts_lock = threading.Lock()
        super().__init__(port)

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if self.is_bare:
            return super().pass_on(method, path, headers, body)
        place, _, query = path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if method == "POST" and "uploads" in asked:
            return self.begin()
        if "uploadId" in asked:
            return self.part(method, place, asked, body)
        if method == "PUT":
            return self.write(place, headers, body)
        return super().pass_on(method, path, headers, body)

    def write(self, place: str, headers: dict[str, str], body: bytes) -> Answer:
        """Writes an object if its condition holds."""
        _, bucket, name = place.split("/", 2)
        condition = {name.lower(): value for name, value in headers.items()}.get(CONDITION)
        if self.is_signed:
            status, told, content = super().pass_on("PUT", f"{place}?X-Goog-Algorithm=none", headers, body)
        else:
            boundary = "part-of-a-write"
            meta = json.dumps({"name": urllib.parse.unquote(name)}).encode()
            head = f"--{boundary}\r\nContent-Type: application/json\r\n\r\n".encode() + meta
            data = f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n".encode() + body
            kept = {"Host": "127.0.0.1", "Content-Type": f"multipart/related; boundary={boundary}"}
            query = "uploadType=multipart" + (f"&ifGenerationMatch={condition}" if condition else "")
            whole = head + data + f"\r\n--{boundary}--\r\n".encode()
            status, told, content = super().pass_on("POST", f"/upload/storage/v1/b/{bucket}/o?{query}", kept, whole)
        if status != 200:
            return status, told, content
        written = json.loads(content)
        return 200, {"etag": f'"{written["etag"]}"', "x-goog-generation": written["generation"]}, b""

    def begin(self) -> Answer:
        with self.parts_lock:
            upload = f"upload-{len(self.parts)}"
            self.parts[upload] = {}
        return 200, {}, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>".encode()

    def part(self, method: str, place: str, asked: dict[str, str], body: bytes) -> Answer:
        """Uploads a part of a large object, completes it, or aborts it."""
        with self.parts_lock:
            parts = self.parts[asked["uploadId"]]
            if method == "PUT":
                parts[int(asked["partNumber"])] = body
                return 200, {"etag": f'"{asked["partNumber"]}"'}, b""
            if method == "DELETE":
                parts.clear()
                return 204, {}, b""
            whole = b"".join(parts[number] for number in sorted(parts))
        status, told, content = self.write(place, {}, whole)
        if status != 200:
            return status, told, content
        xml = f"<CompleteMultipartUploadResult><ETag>{told['etag']}</ETag></CompleteMultipartUploadResult>"
        return 200, told, xml.encode()


@contextlib.contextmanager
def emulator(program: pathlib.Path) -> collections.abc.Iterator[int]:
    """Runs fake-gcs-server; its state is in memory."""
    port = free_port()
    place = ["-scheme", "http", "-host", "127.0.0.1", "-port", port, "-public-host", "127.0.0.1"]
    with running([program, "-backend", "memory", "-log-level", "error", *place], port):
        yield port
