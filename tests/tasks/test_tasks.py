"""Runs the commands of docs/guide/tasks.md, block by block, in an empty folder, and compares the output with the page.

Only two port numbers are changed, because they may be in use. `docker` is `compose.py` beside this file, which starts
Sterling's services in their own root, with the command, environment, files and ports of the compose file. Task 6 runs if
PyTorch is in the environment of the tests (`target/python/bin/pip install './python[export]'`): pip finds it there and does
not download it again."""

import importlib.util
import re
import subprocess
import sysconfig

import pytest
from conftest import ROOT, Shell, Task, tasks

TASKS = tasks((ROOT / "docs/guide/tasks.md").read_text())


def has_torch() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime"))


def has_namespaces() -> bool:
    return subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode == 0


def test_the_page_has_ten_tasks_and_each_says_what_comes_out() -> None:
    assert [task.title.split(".")[0] for task in TASKS] == [str(n) for n in range(1, 11)]
    for task in TASKS:
        assert task.blocks and all(expected for _, expected in task.blocks), task.title


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title)
def test_what_the_page_says_comes_out(task: Task, shell: Shell) -> None:
    if "torch" in task.needs and not has_torch():
        pytest.skip("no PyTorch in this environment")
    if "torch" in task.needs:
        shell.run(f"export PYTHONPATH={sysconfig.get_path('purelib')}")
    if any("docker" in text for text, _ in task.blocks) and not has_namespaces():
        pytest.skip("no namespaces for users on this machine")
    for text, expected in task.blocks:
        status, said = shell.run(text)
        assert status == 0, f"ended with {status}:\n{text}\n{said}"
        check(said, expected)


def check(said: str, expected: list[str]) -> None:
    """Checks that every line of the page occurs, in the order of the page; `...` matches anything."""
    lines = iter(said.splitlines())
    for wanted in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.split("...")))
        assert any(pattern.fullmatch(line) for line in lines), f"no line like {wanted!r}, or not in this place:\n{said}"


def test_lines_are_held_against_the_page() -> None:
    check("a\nb 1 c\nd", ["a", "b ... c", "..."])
    for said, expected in [("a", ["b"]), ("b\na", ["a", "b"]), ("ab", ["a"]), ("", ["..."])]:
        with pytest.raises(AssertionError):
            check(said, expected)
