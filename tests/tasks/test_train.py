"""Runs the code blocks of docs/guide/train.md in an empty folder, and compares their output with the page."""

import re

import pytest
from conftest import ROOT, Shell, Task, free_ports, tasks
from test_tasks import check

PAGE = (ROOT / "docs/guide/train.md").read_text()
GUIDE = PAGE.split("\n## Reference")[0].replace("\n### ", "\n## ")
STEPS = [task for task in tasks(GUIDE) if task.blocks]


def test_the_guide_has_four_steps() -> None:
    assert [step.title.split(".")[0] for step in STEPS] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.title)
def test_what_the_guide_says_comes_out(step: Task, shell: Shell) -> None:
    shell.run('export PATH="$(dirname "$STERLING_PROGRAM"):$PATH"')
    for text, expected in step.blocks:
        status, said = shell.run(text)
        assert status == 0, f"ended with {status}:\n{text}\n{said}"
        check(said, expected)


# Stands in for Ray: each task is a thread.
RAY = """
import threading

class Task:
    def __init__(self, call):
        self.call = call

    def options(self, **resources):
        return self

    def remote(self, *arguments):
        failed = []

        def run():
            try:
                self.call(*arguments)
            except Exception as e:
                failed.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, failed

def remote(**options):
    return Task

def get(tasks):
    for thread, failed in tasks:
        thread.join()
        if failed:
            raise failed[0]
"""


def test_the_ray_script_trains_on_two_hosts_with_the_bits_of_one(shell: Shell) -> None:
    script = re.search(r"```python\n(import ray.*?)```", PAGE, re.S)[1]
    (shell.folder / "ray.py").write_text(RAY)
    for given, here in (("/data/shop", "shop"), ("/data/events", "events.jsonl"), ("/data/learned", "by-two")):
        assert given in script
        script = script.replace(given, here)
    for host, port in zip(("10.0.0.1:7400", "10.0.0.2:7400"), free_ports(2), strict=True):
        assert host in script
        script = script.replace(host, f"127.0.0.1:{port}")
    (shell.folder / "train_on_ray.py").write_text(script)
    # Batches of the guide have one micro-batch, which would leave one host without work.
    wider = "sed -i 's/^batch = 64/batch = 256/' shop/model.toml && rm -rf by-one by-two\n"
    alone = "sterling train shop --events events.jsonl --out by-one > one.json\n"
    status, said = shell.run(wider + alone + "python3 train_on_ray.py && diff -r by-one by-two")
    assert status == 0, said
