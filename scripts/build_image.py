#!/usr/bin/env python3
"""Builds a container image of a built program, without a daemon, a registry or privileges: an OCI image layout, reproducible for
the same program and libraries.

    scripts/build_image.py [--program target/dist/sterling] [--tag latest] [FOLDER, target/image]
    skopeo copy oci:target/image:latest docker-daemon:sterling:latest     # or docker://REGISTRY/sterling:latest

Besides the program the image has its shared libraries, the CA certificates, and an unprivileged user: no shell, no package
manager. The image runs on any machine that has the instruction set of its libraries; `deploy/cpu.Dockerfile` builds such an image on top of Debian.
Debug symbols are stripped unless `--keep-symbols` is set. Timestamps are `$SOURCE_DATE_EPOCH`, or the start of 1970."""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

USER = 10001
AUTHORITIES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")
FILES = {
    "etc/passwd": f"root:x:0:0::/:/nologin\nsterling:x:{USER}:{USER}::/var/lib/sterling:/nologin\n",
    "etc/group": f"root:x:0:\nsterling:x:{USER}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
OWN = ("store", "var/lib/sterling", "var/cache/sterling")
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class Entry:
    """A file of an image, or a folder if ``content`` is unset."""

    path: str
    content: bytes | None = None
    mode: int = 0o755
    owner: int = 0


def libraries(program: pathlib.Path) -> list[pathlib.Path]:
    """Returns the shared libraries of the program, including the loader."""
    said = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    missing = re.findall(r"^\s*(\S+) => not found", said, re.M)
    if missing:
        raise SystemExit(f"{program} needs libraries that are not here: {', '.join(missing)}")
    return sorted(pathlib.Path(found) for found in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", said, re.M))


def folders(entries: Iterable[Entry]) -> list[Entry]:
    """Returns the entries with their parent folders, in the order of their paths."""
    all_of = {entry.path: entry for entry in entries}
    for path in list(all_of):
        for parent in list(pathlib.PurePosixPath(path).parents)[:-1]:
            all_of.setdefault(str(parent), Entry(str(parent)))
    return [all_of[path] for path in sorted(all_of)]


def layer(entries: Iterable[Entry], time: int) -> tuple[bytes, str]:
    """Returns a compressed layer, and the digest of its uncompressed content."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for entry in folders(entries):
            info = tarfile.TarInfo(entry.path)
            info.mode, info.mtime, info.uid, info.gid = entry.mode, time, entry.owner, entry.owner
            info.type = tarfile.DIRTYPE if entry.content is None else tarfile.REGTYPE
            info.size = len(entry.content or b"")
            archive.addfile(info, io.BytesIO(entry.content or b""))
    plain = packed.getvalue()
    return gzip.compress(plain, 6, mtime=0), digest(plain)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Layout:
    """An image layout that is being written."""

    def __init__(self, folder: pathlib.Path):
        self.blobs = folder / "blobs/sha256"
        self.blobs.mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.folder = folder

    def put(self, kind: str, content: bytes) -> dict:
        named = digest(content)
        (self.blobs / named.removeprefix("sha256:")).write_bytes(content)
        return {"mediaType": kind, "digest": named, "size": len(content)}

    def put_json(self, kind: str, value: dict) -> dict:
        return self.put(kind, json.dumps(value, sort_keys=True).encode())


def config(version: str, created: str, layers: list[str]) -> dict:
    """Returns the image configuration: command, user and ports."""
    history = [{"created": created, "created_by": f"scripts/build_image.py: {what}"} for what in ("libraries", "program")]
    return {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "created": created,
        "config": {
            "User": f"{USER}:{USER}",
            "ExposedPorts": {"8080/tcp": {}, "8081/tcp": {}},
            "Volumes": {"/store": {}},
            "Env": ["PATH=/usr/local/bin"],
            "Entrypoint": ["/usr/local/bin/sterling"],
            "Cmd": ["serve", "--store", "/store", "--listen", "0.0.0.0:8080"],
            "WorkingDir": "/var/lib/sterling",
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "sterling",
                "org.opencontainers.image.description": "Index-as-model retrieval server",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": layers},
        "history": history,
    }


def build(program: pathlib.Path, folder: pathlib.Path, tag: str, time: int) -> str:
    """Writes the layout to a new folder, and returns the digest of the image."""
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
    created = datetime.datetime.fromtimestamp(time, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    system = [Entry(str(path)[1:], path.read_bytes()) for path in libraries(program)]
    system += [Entry(path, content.encode(), 0o644) for path, content in FILES.items()]
    system += [Entry(path, owner=USER) for path in OWN] + [Entry("tmp", mode=0o1777)]
    system.append(Entry(str(AUTHORITIES)[1:], AUTHORITIES.read_bytes(), 0o644))
    made = [layer(entries, time) for entries in (system, [Entry("usr/local/bin/sterling", program.read_bytes())])]
    layout = Layout(folder)
    described = layout.put_json("application/vnd.oci.image.config.v1+json", config(version, created, [plain for _, plain in made]))
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described,
        "layers": [layout.put(LAYER, packed) for packed, _ in made],
    }
    named = layout.put_json(manifest["mediaType"], manifest)
    index = {"schemaVersion": 2, "manifests": [{**named, "annotations": {"org.opencontainers.image.ref.name": tag}}]}
    (folder / "index.json").write_text(json.dumps(index, sort_keys=True))
    return named["digest"]


def main() -> None:
    root = pathlib.Path(__file__).parents[1]
    arguments = argparse.ArgumentParser(description="Makes a container image of a built program, as an OCI image layout.")
    arguments.add_argument("folder", nargs="?", type=pathlib.Path, default=root / "target/image", help="folder of the layout (target/image)")
    arguments.add_argument("--program", type=pathlib.Path, default=root / "target/dist/sterling", help="the program (target/dist/sterling)")
    arguments.add_argument("--tag", default="latest", help="the image's tag in the layout (latest)")
    arguments.add_argument("--keep-symbols", action="store_true", help="keep the debug information of the program")
    given = arguments.parse_args()
    if not given.program.is_file():
        raise SystemExit(f"{given.program}: no such program; `cargo build --profile dist --features full` makes one")
    with tempfile.TemporaryDirectory() as scratch:
        program = pathlib.Path(scratch) / "sterling"
        if given.keep_symbols:
            shutil.copy(given.program, program)
        else:
            subprocess.run(["strip", "-o", program, given.program], check=True)
        layout = pathlib.Path(scratch) / "image"
        named = build(program, layout, given.tag, int(os.environ.get("SOURCE_DATE_EPOCH", "0")))
        shutil.rmtree(given.folder, ignore_errors=True)
        given.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(layout, given.folder)
    print(f"{given.folder}: {given.tag}, {named}")


if __name__ == "__main__":
    main()
