"""Assignment of files to workers that may be lost, with a substitute for Ray; `scripts/ray_score.py` uses Ray itself."""

import json
import random
import sys
import types

import pytest
import sterling
from sterling import ray as over_ray

UNITS = 20


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class Cluster:
    """Calls end in any order; a worker is lost at random, with its current file."""

    exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, out, seed=0, loss=0.0, unit=None, ready=None):
        self.out, self.random, self.loss, self.of_unit, self.of_ready = out, random.Random(seed), loss, unit, ready
        self.done, self.started, self.killed, self.lost = set(), 0, 0, 0

    def start(self):
        self.started += 1
        return Worker(self)

    def wait(self, calls, timeout):
        assert calls and timeout > 0
        return [self.random.choice(calls)], []

    def get(self, call):
        return call()

    def kill(self, worker):
        self.killed += 1


class Worker:
    def __init__(self, cluster):
        self.cluster, self.alive = cluster, True

    def __getattr__(self, name):
        if name not in ("ready", "score", "close"):
            raise AttributeError(name)
        return types.SimpleNamespace(remote=lambda *arguments: lambda: getattr(self, f"_{name}")(*arguments))

    def _lose(self):
        if not self.alive or self.cluster.random.random() < self.cluster.loss:
            self.alive = False
            self.cluster.lost += 1
            raise RayError("gone")

    def _ready(self):
        if self.cluster.of_ready:
            raise self.cluster.of_ready
        self._lose()
        return UNITS

    def _score(self, unit):
        said = self.cluster.of_unit(unit) if self.cluster.of_unit else None
        if said:
            return {"unit": unit, "done": False} | said
        # It may be lost before the file is complete, or after.
        self._lose()
        self.cluster.done.add(unit)
        self._lose()
        return {"unit": unit, "done": True}

    def _close(self):
        self._lose()
        if len(self.cluster.done) == UNITS:
            (self.cluster.out / "_SUCCESS.json").write_text(json.dumps({"rows": UNITS}))
        return 0


def run(cluster, monkeypatch, workers=3, told=None):
    monkeypatch.setitem(sys.modules, "ray", cluster)
    return over_ray._Pool(cluster.start, workers, told).run(cluster.out)


@pytest.mark.parametrize("seed", range(30))
def test_every_file_is_done_whoever_is_lost(seed, monkeypatch, tmp_path):
    cluster, heard = Cluster(tmp_path, seed, loss=0.08), []
    try:
        counts = run(cluster, monkeypatch, told=lambda done, all: heard.append((done, all)))
    except sterling.ProgramError as e:
        # One file may be lost repeatedly.
        assert "4th time" in str(e)
        return
    assert counts == {"rows": UNITS} and cluster.done == set(range(UNITS))
    assert heard == [(n + 1, UNITS) for n in range(UNITS)]
    assert cluster.started <= 3 + cluster.lost + over_ray.ATTEMPTS


def test_nobody_starts_before_the_first_is_ready(monkeypatch, tmp_path):
    cluster, seen = Cluster(tmp_path), []
    ready = Worker._ready
    monkeypatch.setattr(Worker, "_ready", lambda worker: seen.append(cluster.started) or ready(worker))
    run(cluster, monkeypatch, workers=50)
    assert seen[0] == 1 and cluster.started <= UNITS, "more workers than files"


def test_a_job_that_is_refused_ends_at_once(monkeypatch, tmp_path):
    cluster = Cluster(tmp_path, ready=RayTaskError(sterling.ProgramError("another job was started here")))
    with pytest.raises(sterling.ProgramError, match="another job"):
        run(cluster, monkeypatch)
    assert cluster.started == 1


def test_a_job_with_too_many_problems_is_refused_at_the_end(monkeypatch, tmp_path):
    cluster = Cluster(tmp_path)
    monkeypatch.setattr(Worker, "_close", lambda worker: "sterling score ended with 2: 5 of 9 rows have a problem")
    with pytest.raises(sterling.ProgramError, match="5 of 9 rows have a problem"):
        run(cluster, monkeypatch)
    assert cluster.done == set(range(UNITS)) and cluster.started == 3


def test_workers_that_never_start_are_given_up(monkeypatch, tmp_path):
    cluster = Cluster(tmp_path, loss=1.0)
    with pytest.raises(sterling.ProgramError, match="workers do not start"):
        run(cluster, monkeypatch)
    assert cluster.started == 3 * over_ray.ATTEMPTS


def test_a_file_that_fails_keeps_no_other_back(monkeypatch, tmp_path):
    wrong = {"code": "invalid", "retryable": False, "error": "not a readable Parquet file"}
    away = {"code": "unavailable", "retryable": True, "error": "the cluster is away"}
    cluster = Cluster(tmp_path, unit=lambda unit: wrong if unit == 3 else away if unit == 7 else None)
    with pytest.raises(sterling.ProgramError, match="2 of 20 files failed: file 3: not a readable.*file 7: the cluster is away, the 4th time"):
        run(cluster, monkeypatch)
    assert cluster.done == set(range(UNITS)) - {3, 7}


def test_what_is_away_for_a_moment_is_asked_again(monkeypatch, tmp_path):
    tries = []
    cluster = Cluster(tmp_path)
    cluster.of_unit = lambda unit: {"retryable": True, "error": "away"} if unit == 5 and not tries.append(1) and len(tries) < 3 else None
    assert run(cluster, monkeypatch) == {"rows": UNITS} and len(tries) == 3
