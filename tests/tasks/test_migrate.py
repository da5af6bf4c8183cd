"""Runs the commands of docs/guide/migrate.md in an empty folder, and compares their output with the page."""

import re
import shutil

from conftest import ROOT, Shell, tasks
from test_tasks import check

PAGE = (ROOT / "docs/guide/migrate.md").read_text()
# Faiss is not installed here.
GUIDE = re.sub(r"^```python\n.*?^```$", "", PAGE, flags=re.M | re.S)


def test_the_commands_of_the_page_run(shell: Shell) -> None:
    shell.run('export PATH="$(dirname "$STERLING_PROGRAM"):$PATH"')
    shutil.copy(ROOT / "tests/golden/faiss/flat_ip.index", shell.folder / "index.faiss")
    blocks = [block for task in tasks(GUIDE) for block in task.blocks]
    assert len(blocks) == 2
    for text, expected in blocks:
        status, said = shell.run(text)
        assert status == 0, f"ended with {status}:\n{text}\n{said}"
        check(said, expected)
