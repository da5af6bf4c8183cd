"""A server with two models, and headless Chromium.

Needs the program `sterling` (`$STERLING`, or target/debug/sterling) and Debian's packages `chromium` and `chromium-driver`."""

import collections.abc
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import sterling
from selenium import webdriver

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(os.environ.get("STERLING", ROOT / "target/debug/sterling"))
GENRES = ["fantasy", "crime", "poetry"]
BOOKS = 300


def shelf(folder: pathlib.Path) -> pathlib.Path:
    """Writes books with vectors of eight numbers as an item file."""
    path = folder / "books.jsonl"
    with path.open("w") as file:
        for n in range(BOOKS):
            vector = [((n * (d + 3) * 7919) % 97) / 48 - 1 for d in range(8)]
            # Markup in an item must be shown as text.
            title = f"Book {n}" if n else "Book 0 <img src=x onerror=\"document.title='broken'\">"
            attributes = {"title": title, "genre": GENRES[n % 3], "pages": 50 + n, "price": n / 10}
            file.write(json.dumps({"id": n, "embedding": vector, "attributes": attributes}) + "\n")
    return path


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: in the short run of scripts/test.sh; the others are in that of --all")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> collections.abc.Iterator[sterling.Server]:
    """A server with updates, with two versions of `books` and the `tiny` package of the tests."""
    folder = tmp_path_factory.mktemp("console")
    store = folder / "store"
    books = [PROGRAM, "publish", "--name", "books", "--items", shelf(folder), "--store", store]
    for _ in range(2):
        subprocess.run(books, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    sterling.publish(ROOT / "tests/golden/tiny", store, program=PROGRAM)
    with sterling.serve(store, program=PROGRAM, settings={"STERLING_UPDATES": str(folder / "updates")}) as running:
        running.store = store
        yield running


@pytest.fixture(scope="session")
def chromium() -> collections.abc.Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1300,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    # Number of unanswered requests of the page.
    count = """window.unanswered = 0;
        for (const [of, name] of [[window, "fetch"], [Response.prototype, "text"]]) {
            const real = of[name];
            of[name] = async function (...all) { unanswered++; try { return await real.apply(this, all); } finally { unanswered--; } };
        }"""
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": count})
    yield driver
    driver.quit()
