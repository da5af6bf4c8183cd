"""Outages, as time series, and the alerts that they raise: each file of `alerts/` is a unit test of `promtool` (Debian's package `prometheus`)."""

import pathlib
import shutil
import subprocess

import pytest

CASES = sorted(pathlib.Path(__file__).parent.glob("alerts/*.yml"))


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_an_outage_raises_its_alert(case: pathlib.Path) -> None:
    tested = subprocess.run(["promtool", "test", "rules", case], capture_output=True, text=True, cwd=case.parent)
    assert tested.returncode == 0, tested.stdout + tested.stderr
