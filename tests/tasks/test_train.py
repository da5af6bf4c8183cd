"""Runs the code blocks of docs/guide/train.md in an empty folder, and compares their output with the page."""

import pytest
from conftest import ROOT, Shell, Task, tasks
from test_tasks import check

GUIDE = (ROOT / "docs/guide/train.md").read_text().split("\n## Reference")[0].replace("\n### ", "\n## ")
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
