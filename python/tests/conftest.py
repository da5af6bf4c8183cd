"""Shared fixtures of the tests. Those that need the program use $STERLING or target/debug/sterling, and are skipped without
it."""

import pathlib
from collections.abc import Iterator

import pytest
import sterling

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def program() -> pathlib.Path:
    built = ROOT / "target/debug/sterling"
    found = sterling.find_program(required=False) or (built if built.exists() else None)
    if found is None:
        pytest.skip("no program `sterling`: give $STERLING or build it")
    return found


@pytest.fixture(scope="session")
def tiny() -> pathlib.Path:
    return ROOT / "tests/golden/tiny"


@pytest.fixture(scope="session")
def store(program: pathlib.Path, tiny: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A store with version 1 of the tiny package of the tests."""
    folder = tmp_path_factory.mktemp("store")
    recipe = folder / "recipe.toml"
    recipe.write_text('[index]\nrescore = "f32"\n[tables]\npackages = "int8"\n')
    sterling.publish(tiny, folder / "store", index=recipe, program=program)
    return folder / "store"


@pytest.fixture(scope="module")
def server(store: pathlib.Path, program: pathlib.Path) -> Iterator[sterling.Server]:
    """A server of that store."""
    with sterling.serve(store, program=program) as server:
        yield server
