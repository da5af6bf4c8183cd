"""Shared code of the chaos scripts: programs in network namespaces, and waiting for conditions. Needs root and iproute2."""

import contextlib
import http.client
import json
import subprocess
import sys
import time

from program import STERLING


def run(command):
    subprocess.run(command.split(), check=True)


def spaces(stack, names, links):
    """Creates namespaces with these names, until the stack ends. Namespaces of an earlier run are removed first, and their
    links too, because a namespace exists as long as one of its connections waits for its peer."""

    def away():
        for kind, things in (("netns", names), ("link", links)):
            for name in things:
                subprocess.run(["ip", kind, "del", name], stderr=subprocess.DEVNULL)

    away()
    stack.callback(away)
    for name in names:
        run(f"ip netns add {name}")
        run(f"ip -n {name} link set lo up")


class Process:
    """A program in a namespace."""

    def __init__(self, space, command, environment=None):
        self.command = ["ip", "netns", "exec", space, *map(str, command)]
        self.environment = environment
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_running(self):
        return self.process.poll() is None

    def kill(self):
        self.process.kill()
        self.process.wait()


class Sterling(Process):
    """A server or a router in a namespace, with its own address."""

    def __init__(self, space, address, arguments, environment=None):
        self.address = address
        super().__init__(space, [STERLING, *arguments, "--listen", f"{address}:8080"], environment)

    def ask(self, method, path, body=None, timeout=40):
        with contextlib.closing(http.client.HTTPConnection(self.address, 8080, timeout=timeout)) as connection:
            connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def is_ready(self):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/readyz", timeout=2)[0] == 200
        return False


def until(what, is_so, most=90, detail=lambda: ""):
    start = time.monotonic()
    while not is_so():
        if time.monotonic() - start > most:
            sys.exit(f"timed out waiting until {what} {detail()}")
        time.sleep(0.02)
