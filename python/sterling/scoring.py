"""Worker of offline scoring: one ``sterling score --units -``, which receives the numbers of files and reports the result of
each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from .errors import ProgramError
from .program import find_program

Path = str | os.PathLike[str]

TASKS = ("retrieve", "rank", "items")


def command(
    inputs: Sequence[Path],
    output: Path,
    *,
    model: str,
    store: Path = "store",
    request: Mapping[str, Any] | None = None,
    task: str = "retrieve",
    max_problems: int | str = 0,
) -> list[str]:
    """Returns the arguments of ``sterling score`` for a job (``docs/guide/offline-scoring.md``). Paths become absolute, because
    workers run in other folders. ``max_problems`` rows of the job may have a problem: a number, or a share such as ``"0.5%"``.

    Raises `ValueError` without inputs, for URLs instead of paths, or for a ``task`` other than ``retrieve``, ``rank`` and
    ``items``.
    """
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}, expected one of {', '.join(TASKS)}")
    if not inputs:
        raise ValueError("inputs: got no files, expected at least one")
    said = ["score", "--model", model, "--in", *(_absolute("inputs", path) for path in inputs)]
    # The URL of a bucket is not a path.
    store_at = os.fspath(store) if "://" in os.fspath(store) else os.path.abspath(store)
    said += ["--out", _absolute("output", output), "--store", store_at]
    said += [f"--{task}"] if task != "retrieve" else []
    return said + ["--request", json.dumps(request or {}, allow_nan=False), "--max-problems", str(max_problems)]


def _absolute(what: str, path: Path) -> str:
    if "://" in os.fspath(path):
        raise ValueError(f"{what}: got {os.fspath(path)!r}, expected files and folders that all workers see; buckets are for `store` alone")
    return os.path.abspath(path)


class Worker:
    """A process that scores files of a job, each named by its index in the job.

    The worker process ends with this process, or with the ``with`` block.
    """

    def __init__(self, arguments: Sequence[str], *, threads: int | None = None, program: Path | None = None):
        """Starts the process and waits until it has loaded its model; raises `ProgramError` with the output of a process that ends before."""
        said = [str(find_program(program)), *arguments, "--units", "-"]
        said += ["--threads", str(threads)] if threads else []
        descriptor, log = tempfile.mkstemp(prefix="sterling-score-", suffix=".log")
        self._log = pathlib.Path(log)
        #: Exit status of the process with the end of its log, once the worker is closed.
        self.ended: ProgramError | None = None
        with os.fdopen(descriptor, "wb") as errors:
            self._process = _started(
                lambda: subprocess.Popen(
                    said, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8", preexec_fn=_die_with_parent
                )
            )
        try:
            self.units = int(self._line()["units"])
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def score(self, unit: int) -> dict[str, Any]:
        """Scores the file with index ``unit``, below ``units``, and returns the report of the program.

        The report has ``done``, and ``counts`` or ``code``, ``retryable`` and ``error``.

        Raises `ProgramError` if the process has ended.
        """
        assert self._process.stdin is not None
        # If the process has ended, reading its answer fails.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{unit}\n")
            self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._ended(self._process.wait())
        return json.loads(line)

    def _ended(self, code: int) -> ProgramError:
        log = self._log.read_text(encoding="utf-8", errors="replace")[-4000:].strip() if self._log.exists() else ""
        error = ProgramError(f"sterling score ended with {code}: {log}")
        error.status = code
        return error

    def close(self) -> int:
        """Closes the input of the process and waits for its end. If no file of the job is left, the process writes the counts.
        Returns the exit status: 2 if a file failed, or if more rows have a problem than the job allows; ``ended`` then holds the output of the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        code = self._process.wait()
        self.ended = self._ended(code)
        self._process.stdout.close()
        self._log.unlink(missing_ok=True)
        return code

    def kill(self) -> None:
        """Kills the process; another worker scores the file that it was working on."""
        self._process.kill()
        self.close()


def _started(start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Starts a process from a thread that lives as long as the process. The kernel ends the process when the thread that
    forked it ends, and the thread of the caller may end earlier."""
    made: concurrent.futures.Future[subprocess.Popen[str]] = concurrent.futures.Future()

    def run() -> None:
        try:
            process = start()
        except BaseException as e:
            made.set_exception(e)
            return
        made.set_result(process)
        process.wait()

    threading.Thread(target=run, name="sterling-score", daemon=True).start()
    return made.result()


def _die_with_parent() -> None:
    """Makes the kernel end this process when its parent ends, because the parent may be killed at any moment (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
