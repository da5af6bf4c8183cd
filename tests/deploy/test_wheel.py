"""The wheel on a clean machine: built, installed in its own environment, used from an empty folder."""

import os
import pathlib
import platform
import re
import subprocess
import sys
import urllib.request
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Wheel of the tested program, for systems of this age."""
    folder = tmp_path_factory.mktemp("wheels")
    environment = {**os.environ, "STERLING_PROGRAM": str(PROGRAM), "STERLING_GLIBC": platform.libc_ver()[1], "PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts/build_wheel.sh", folder], check=True, env=environment, stdin=subprocess.DEVNULL)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def home(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An environment with the wheel only: the program needs none of the package's dependencies."""
    home = tmp_path_factory.mktemp("environments") / "one"
    venv.create(home, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, stdin=subprocess.DEVNULL)
    return home


def test_the_wheel_brings_the_program_and_the_demos_model(wheel: pathlib.Path, home: pathlib.Path) -> None:
    assert re.fullmatch(r"sterling-[\d.]+-py3-none-manylinux_\d+_\d+_x86_64\.whl", wheel.name)
    said = subprocess.run([home / "bin/sterling", "--version"], check=True, capture_output=True, text=True, env={}).stdout
    assert said.startswith("sterling ")
    for path in (ROOT / "models/debian").iterdir():
        assert (home / "share/sterling/debian" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.skipif("STERLING_WHEEL_DEMO" not in os.environ, reason="publishing the demo takes minutes without optimisation: STERLING_WHEEL_DEMO=1 runs it")
def test_a_demo_comes_with_the_wheel_alone(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # The source tree of the program has the model too: a different name shows which of the two is used.
    model = home / "share/sterling/debian/model.toml"
    model.write_text(model.read_text().replace('name = "debian"', 'name = "installed"', 1))
    command = [home / "bin/sterling", "demo", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=tmp_path, env={"PATH": "/nowhere"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            lines = iter(demo.stdout.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
            body = b'{"features": {"installed": [0, 5873]}, "k": 5, "columns": ["name"]}'
            with urllib.request.urlopen(f"{url}/v1/models/installed:retrieve", body, timeout=60) as answer:
                assert answer.read().count(b'"name"') == 5
        finally:
            demo.terminate()
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]
