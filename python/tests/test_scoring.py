"""The worker of offline scoring: its input, its reports, and its end together with its parent."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import sterling
from sterling import scoring


@pytest.fixture
def job(store, tmp_path):
    """Returns the arguments of a job over three files, and its output folder."""
    for n in range(3):
        rows = [{"id": 10 * n + i, "features": {"installed": [n, i]}} for i in range(10)]
        (tmp_path / f"users-{n}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = sorted(tmp_path.glob("users-*.jsonl"))
    return scoring.command(inputs, tmp_path / "out", model="tiny@1", store=store, request={"k": 3}), tmp_path / "out"


def test_a_worker_scores_what_it_is_told(job, program):
    arguments, out = job
    with scoring.Worker(arguments, threads=1, program=program) as worker:
        assert worker.units == 3
        assert worker.score(1)["counts"] == {"rows": 10, "scored": 10, "problems": {}}
        assert worker.score(1) == {"unit": 1, "done": True}
        said = worker.score(9)
        assert (said["done"], said["code"], said["retryable"]) == (False, "invalid", False) and "0 to 2" in said["error"]
    assert not (out / "_SUCCESS.json").exists()
    with scoring.Worker(arguments, program=program) as worker:
        assert [worker.score(unit)["done"] for unit in range(3)] == [True] * 3
    assert json.loads((out / "_SUCCESS.json").read_text())["scored"] == 30
    assert len(list(out.glob("part-*.parquet"))) == 3


def test_a_job_that_is_refused_says_why(job, program, store, tmp_path):
    with pytest.raises(sterling.ProgramError, match="model `nobody`") as wrong:
        scoring.Worker(scoring.command([tmp_path / "users-0.jsonl"], tmp_path / "a", model="nobody", store=store), program=program)
    assert wrong.value.status == 2
    with pytest.raises(ValueError, match="task: got 'rnk', expected one of"):
        scoring.command(["a"], "b", model="tiny", task="rnk")
    with pytest.raises(ValueError, match="no files"):
        scoring.command([], "b", model="tiny")
    for inputs, output in ((["a"], "s3://bucket/b"), (["s3://bucket/a"], "b")):
        with pytest.raises(ValueError, match="got 's3://bucket/.', expected files and folders"):
            scoring.command(inputs, output, model="tiny")


def test_more_problems_than_allowed_are_refused_at_the_end(job, store, program):
    arguments, out = job
    users = out.parent / "users-0.jsonl"
    users.write_text(users.read_text() + '{"id": 99, "features": {"installed": "x"}, "more": 1}\n')
    worker = scoring.Worker(arguments, program=program)
    assert [worker.score(unit)["done"] for unit in range(3)] == [True] * 3
    assert worker.close() == 2 and "1 of 31 rows have a problem" in str(worker.ended)
    assert not (out / "_SUCCESS.json").exists()
    allowed = scoring.command([users], out.parent / "allowed", model="tiny@1", store=store, max_problems="10%")
    with scoring.Worker(allowed, program=program) as worker:
        assert worker.score(0)["counts"]["problems"] == {"invalid": 1}
    assert (out.parent / "allowed" / "_SUCCESS.json").exists()


def test_an_output_folder_is_a_data_set(job, program):
    arguments, out = job
    users = out.parent / "users-1.jsonl"
    users.write_text(users.read_text() + '{"id": 99, "more": 1}\n')
    subprocess.run([program, *arguments[:-1], "1"], check=True, capture_output=True)
    assert len(list(out.glob("_*.problems.jsonl"))) == 1
    rows = {}
    if pyarrow_parquet := installed("pyarrow.parquet"):
        rows["pyarrow"] = pyarrow_parquet.read_table(out).num_rows
        if pandas := installed("pandas"):
            rows["pandas"] = len(pandas.read_parquet(out))
    if polars := installed("polars"):
        rows["polars"] = polars.read_parquet(out).height
    if not rows:
        pytest.skip("neither PyArrow nor Polars is installed")
    assert set(rows.values()) == {30}, rows


def installed(module):
    """Returns a module, if it is installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def test_a_worker_that_is_killed_is_missed(job, program):
    with scoring.Worker(job[0], program=program) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(sterling.ProgramError, match="ended with -9") as wrong:
            worker.score(0)
        assert wrong.value.status == -9


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_a_worker_outlives_the_thread_that_made_it(tmp_path):
    program = tmp_path / "sterling"
    program.write_text('#!/bin/sh\necho \'{"units": 1}\'\nwhile read n; do echo \'{"done": true}\'; done\n')
    program.chmod(0o755)
    made = []

    def make() -> None:
        made.extend([scoring.Worker(["score"], program=program), threading.get_native_id()])

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    worker, task = made
    while os.path.exists(f"/proc/self/task/{task}"):
        time.sleep(0.01)
    with worker:
        assert worker.score(0) == {"done": True}


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_a_worker_dies_with_its_parent(job, program):
    code = "import json, sys, time; from sterling import scoring; w = scoring.Worker(json.loads(sys.argv[1]), program=sys.argv[2]); print(w.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, json.dumps(job[0]), str(program)], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            # A zombie is dead too.
            if open(f"/proc/{worker}/stat").read().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("it lives")
