"""Offline scoring on a Ray cluster: each worker is an actor that owns one ``sterling score --units -`` and receives numbers of
files.

Rows never pass through Python or the object store of Ray: the program reads the input files and writes complete output files on a
file system that all nodes share. If a worker, a process or a node is lost, another worker scores its file again and writes the
same bytes.
"""

from __future__ import annotations

import collections
import glob
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import scoring
from .errors import ProgramError
from .program import Path

#: Exit status of a worker that rejects the job; a retry would not help.
REFUSED = 2
#: Number of times that a file may be lost with its worker, or fail with a retryable error, before the job fails.
ATTEMPTS = 4
#: Seconds that the driver waits for results before it checks its workers.
_WAIT = 5.0


class _Actor:
    """Runs in Ray: one `scoring.Worker`."""

    def __init__(self, arguments: list[str], threads: int, program: str | None):
        self._start = lambda: scoring.Worker(arguments, threads=threads, program=program)

    def ready(self) -> int:
        """Starts the worker and returns the number of files of the job."""
        try:
            self._worker = self._start()
        except ProgramError as e:
            if e.status is not None and e.status < 0:
                os._exit(1)
            # The program rejects the job; every other worker would reject it as well.
            raise
        return self._worker.units

    def score(self, unit: int) -> dict[str, Any]:
        try:
            return self._worker.score(unit)
        except ProgramError:
            # An exception would count as an answer, so the actor exits: without its process it is useless.
            os._exit(1)

    def close(self) -> str | None:
        """Ends the worker; returns the reason if the program rejects the job."""
        return str(self._worker.ended) if self._worker.close() == REFUSED else None


def score(
    inputs: str | Sequence[Path],
    output: Path,
    *,
    model: str,
    store: Path = "store",
    request: Mapping[str, Any] | None = None,
    task: str = "retrieve",
    max_problems: int | str = 0,
    workers: int | None = None,
    cpus: int | None = None,
    program: Path | None = None,
    told: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Scores files on the cluster that ``ray`` is connected to and returns the counts of ``_SUCCESS.json``.

    ``inputs`` is a pattern such as ``/data/users/*.parquet`` or a list of files. ``inputs``, ``output``, ``store`` and
    ``program`` are paths that mean the same on every node. There are ``workers`` actors of ``cpus`` CPUs each; the default is one
    per node, with all of its CPUs but one, which Ray's own tasks may need. ``told`` is called with the number of finished files and
    of all files. A job that was started in ``output`` is resumed. ``max_problems`` rows may have a problem: a number, or a share
    such as ``"0.5%"``.

    Raises `ProgramError` with the files that failed and the reasons, or if more rows have a problem; all other files are
    then complete.
    """
    import ray

    paths = sorted(glob.glob(inputs)) if isinstance(inputs, str) else list(inputs)
    arguments = scoring.command(paths, output, model=model, store=store, request=request, task=task, max_problems=max_problems)
    if not ray.is_initialized():
        ray.init()
    nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise ProgramError("the Ray cluster has no node with a CPU")
    cpus = cpus or max(1, int(min(nodes)) - 1)
    remote = ray.remote(num_cpus=cpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")(_Actor)
    pool = _Pool(lambda: remote.remote(arguments, cpus, str(program) if program else None), workers or len(nodes), told)
    return pool.run(pathlib.Path(output))


class _Pool:
    """Assigns file numbers to idle workers, and assigns a number again if its worker is lost."""

    def __init__(self, start: Callable[[], Any], workers: int, told: Callable[[int, int], None] | None):
        self._start, self._most, self._told = start, workers, told
        #: Calls in progress: the worker and the file of each, None while the worker starts.
        self._calls: dict[Any, tuple[Any, int | None]] = {}
        self._waiting: collections.deque[int] = collections.deque()
        self._idle: list[Any] = []
        self._tries: collections.Counter[int | None] = collections.Counter()
        self._failed: dict[int, str] = {}
        self._units: int | None = None
        self._done = 0

    def run(self, output: pathlib.Path) -> dict[str, Any]:
        import ray

        try:
            # Only the first worker writes the job description, so that the other workers need not read all inputs.
            self._begin()
            while self._units is None or self._calls_of_units() or self._waiting:
                ready, _ = ray.wait(list(self._calls), timeout=_WAIT)
                for call in ready:
                    self._ended(call, ray)
                self._fill()
            if self._failed:
                some = "; ".join(f"file {unit}: {why}" for unit, why in sorted(self._failed.items())[:5])
                raise ProgramError(f"{len(self._failed)} of {self._units} files failed: {some}")
            return self._counts(output, ray)
        finally:
            self._kill(ray)

    def _calls_of_units(self) -> bool:
        return any(unit is not None for _, unit in self._calls.values())

    def _begin(self) -> None:
        worker = self._start()
        self._calls[worker.ready.remote()] = (worker, None)

    def _ended(self, call: Any, ray: Any) -> None:
        worker, unit = self._calls.pop(call)
        try:
            said = ray.get(call)
        except ray.exceptions.RayTaskError as e:
            raise ProgramError(str(e.cause or e)) from None
        except ray.exceptions.RayError as e:
            self._lost(unit, f"the worker of this file was lost: {type(e).__name__}: {e}")
            return
        if unit is None:
            if self._units is None:
                self._units = said
                self._waiting.extend(range(self._units))
        elif said["done"]:
            self._done += 1
            if self._told:
                self._told(self._done, self._units or 0)
        elif said["retryable"]:
            self._lost(unit, said["error"])
        else:
            self._failed[unit] = said["error"]
        self._idle.append(worker)

    def _lost(self, unit: int | None, why: str) -> None:
        self._tries[unit] += 1
        if unit is None:
            if self._tries[None] >= ATTEMPTS * self._most:
                raise ProgramError(f"workers do not start: {why}")
        elif self._tries[unit] >= ATTEMPTS:
            self._failed[unit] = f"{why}, the {self._tries[unit]}th time"
        else:
            self._waiting.append(unit)

    def _fill(self) -> None:
        """Assigns waiting files to idle workers, and replaces lost workers."""
        while self._idle and self._waiting:
            worker, unit = self._idle.pop(), self._waiting.popleft()
            self._calls[worker.score.remote(unit)] = (worker, unit)
        alive = len(self._calls) + len(self._idle)
        starting = sum(unit is None for _, unit in self._calls.values())
        wanted = len(self._waiting) if self._units is not None else 1
        for _ in range(min(self._most - alive, wanted - starting)):
            self._begin()

    def _counts(self, output: pathlib.Path, ray: Any) -> dict[str, Any]:
        """Stops the workers and returns the counts; at that point no file is left to score."""
        path = output / "_SUCCESS.json"
        for attempt in range(ATTEMPTS):
            refused = None
            for worker in self._idle:
                try:
                    refused = ray.get(worker.close.remote()) or refused
                except ray.exceptions.RayError:
                    continue
            self._idle.clear()
            if path.exists():
                return json.loads(path.read_text())
            if refused:
                raise ProgramError(refused)
            worker = self._start()
            try:
                ray.get(worker.ready.remote())
                self._idle.append(worker)
            except ray.exceptions.RayError:
                if attempt + 1 == ATTEMPTS:
                    raise
        raise ProgramError(f"{path}: not written, though all files are done")

    def _kill(self, ray: Any) -> None:
        for worker in [worker for worker, _ in self._calls.values()] + self._idle:
            ray.kill(worker)
        self._calls.clear()
        self._idle.clear()
