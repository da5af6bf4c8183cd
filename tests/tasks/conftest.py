"""The shell session that runs the commands of docs/guide/tasks.md."""

import contextlib
import os
import pathlib
import random
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))
# Ports of the page, which may be in use on the test machine.
PORTS = ("8080", "8443")


@dataclass
class Task:
    """A section of the page: blocks of commands, each with its expected lines."""

    title: str
    needs: set[str] = field(default_factory=set)
    blocks: list[tuple[str, list[str]]] = field(default_factory=list)


def tasks(page: str) -> list[Task]:
    found = []
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, rest = section.partition("\n")
        task = Task(title, set(re.findall(r"<!-- needs (\w+) -->", rest)))
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", rest, re.M | re.S):
            if language == "sh":
                task.blocks.append((text, []))
            elif language == "text":
                task.blocks[-1][1].extend(text.splitlines())
            else:
                raise AssertionError(f"{title}: a block of {language} is neither typed nor expected output")
        found.append(task)
    return found


def free_ports(count: int) -> list[str]:
    """Ports below those that the kernel gives to connections: one of these could take them before their server listens."""
    ports = []
    for port in random.sample(range(12000, 32000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(str(port))
        if len(ports) == count:
            return ports
    raise AssertionError(f"fewer than {count} of 1000 ports from 12000 to 31999 are free")


class Shell:
    """One bash for all blocks, as a person uses it: folder, variables and background jobs persist."""

    def __init__(self, folder: pathlib.Path, path: pathlib.Path):
        *ports, admin = free_ports(len(PORTS) + 1)
        self.ports = dict(zip(PORTS, ports))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("STERLING", "PYTHON", "VIRTUAL_ENV"))}
        environment = kept | {
            "CLONE": str(ROOT),
            "STERLING_PROGRAM": str(path / "sterling"),
            "STERLING_LISTEN": f"127.0.0.1:{self.ports['8080']}",
            "STERLING_HTTP__DRAIN_MS": "0",
            "PATH": f"{path / 'tools'}:{os.environ['PATH']}",
            "TASKS_PORTS": ",".join(f"{port}={free}" for port, free in (self.ports | {"admin": admin}).items()),
        }
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, env=environment,
            start_new_session=True,
        )

    def run(self, text: str, seconds: float = 150) -> tuple[int, str]:
        """Returns the output of a block and the status of its last command; the first failing command ends it."""
        self.count += 1
        for port, free in self.ports.items():
            text = text.replace(f":{port}", f":{free}")
        block = self.folder.parent / f"block-{self.count}.sh"
        block.write_text(text)
        # `set -e` would end the shell: the trap leaves only the block, and its number reports it.
        end = f"=== end of block {self.count}:"
        line = f"trap 'failed=$?; trap - ERR; return $failed' ERR; . {block}; status=$?; trap - ERR; printf '\\n{end} %s\\n' $status\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        said, deadline = b"", time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            while not (ended := re.search(rf"\n{re.escape(end)} (\d+)\n".encode(), said)):
                left = deadline - time.monotonic()
                assert left > 0 and ready.select(left), f"no end after {seconds} s of:\n{text}\n{said.decode(errors='replace')}"
                part = os.read(self.process.stdout.fileno(), 1 << 16)
                assert part, f"the shell ended in:\n{text}\n{said.decode(errors='replace')}"
                said += part
        return int(ended[1]), said[: ended.start()].decode(errors="replace")

    def close(self) -> None:
        """Ends the shell and its background jobs."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory):
    """A shell in an empty folder, with a substitute for a missing `docker`."""
    place = tmp_path_factory.mktemp("tasks")
    (place / "tools").mkdir()
    (place / "empty").mkdir()
    # Stripping makes the debug build a third as large, because it goes into a wheel.
    if not shutil.which("strip") or subprocess.run(["strip", "-o", place / "sterling", PROGRAM]).returncode != 0:
        shutil.copy(PROGRAM, place / "sterling")
    docker = place / "tools/docker"
    docker.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests/tasks/compose.py"}" "$@"\n')
    docker.chmod(0o755)
    shell = Shell(place / "empty", place)
    yield shell
    shell.close()
