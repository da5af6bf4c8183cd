"""The console in a real browser with real clicks and keys; its content is compared with the API."""

import collections.abc
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import urllib.parse
import urllib.request

import pytest
import sterling
from conftest import BOOKS, GENRES, PROGRAM, ROOT, shelf
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

PAGES = ["query", "models", "live", "index", "tables", "shards"]
PICTURES = ROOT / "target/console"


class Console:
    """The page, and the actions of a user."""

    def __init__(self, driver: webdriver.Chrome, url: str):
        self.driver, self.url = driver, url

    def open(self, page: str = "query", model: str | None = None) -> "Console":
        self.driver.get("about:blank")
        self.driver.get(f"{self.url}/#{page}")
        self.until(lambda: "items in" in self.text("#about"))
        if model:
            self.until(lambda: Select(self.one("#model")).select_by_value(model) is None)
            self.until(lambda: f"{model}, version" in self.text("#about"))
        return self

    def is_quiet(self) -> bool:
        """Returns whether the page has no request in progress and has drawn all answers."""
        return self.driver.execute_script("return unanswered === 0")

    def until(self, holds: collections.abc.Callable[[], object], seconds: float = 30) -> object:
        return WebDriverWait(self.driver, seconds, ignored_exceptions=[Exception]).until(lambda _: holds())

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def rows(self, selector: str) -> list[list[str]]:
        read = "return [...document.querySelectorAll(arguments[0])].map(row => [...row.cells].map(cell => cell.textContent))"
        return self.driver.execute_script(read, f"{selector} tbody tr")

    def click(self, selector: str) -> None:
        # An element that is redrawn before the click is looked up again.
        wait = WebDriverWait(self.driver, 10, ignored_exceptions=[StaleElementReferenceException])
        wait.until(lambda _: self.one(selector).click() is None)

    def filter(self, text: str) -> None:
        field = self.one("#filter textarea")
        field.clear()
        field.send_keys(text)

    def vector(self, text: str) -> None:
        field = self.one("#features textarea")
        field.clear()
        field.send_keys(text)

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))
        assert (PICTURES / f"{name}.png").stat().st_size > 5000

    def severe(self) -> list[str]:
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture
def console(chromium: webdriver.Chrome, server: sterling.Server) -> Console:
    chromium.get_log("browser")
    chromium.set_window_size(1300, 1000)
    return Console(chromium, server.url)


VECTOR = [0.5, -1, 0.25, 0, 1, -0.5, 0.75, 0.125]


@pytest.mark.smoke
def test_a_query_shows_what_the_api_answers(console: Console, server: sterling.Server) -> None:
    console.open(model="books").vector(str(VECTOR))
    console.filter("genre:crime AND pages > 100")
    console.until(lambda: "items pass" in console.text("#filter [role=status]"))
    console.click("#send")
    console.until(lambda: console.rows(".answer [aria-label=Items]"))
    body = {"vector": VECTOR, "filter": "genre:crime AND pages > 100", "k": 10, "columns": ["title", "genre"]}
    expected = server.post("/v1/models/books:retrieve", body)["items"]
    shown = console.rows(".answer [aria-label=Items]")
    assert [row[1] for row in shown] == [str(item["id"]) for item in expected]
    assert [row[2] for row in shown] == [item["columns"]["title"] for item in expected]
    steps = [row[0] for row in console.rows(".answer [aria-label=Steps]")]
    assert "scan" in steps and "top" in steps
    console.picture("query")
    console.click(".answer button")
    console.until(lambda: len(console.all(".cards > li")) == len(expected))
    console.picture("cards")
    console.click(".answer button")


def test_items_are_found_by_name_and_fill_features(console: Console, server: sterling.Server) -> None:
    console.open(model="tiny")
    field = console.one("#features input[aria-label=installed]")
    found = server.get("/v1/models/tiny/items?contains=&limit=1")["items"][0]
    name = next(value for value in found["attributes"].values() if isinstance(value, str))
    field.send_keys(name)
    console.until(lambda: console.all("#features [role=option]"))
    field.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    console.until(lambda: console.all(".chips li"))
    assert console.text(".chips li").startswith(name)
    field.send_keys("3", Keys.ENTER)
    console.until(lambda: len(console.all(".chips li")) == 2)
    console.one("#features").find_elements(By.CSS_SELECTOR, ".chips button")[0].click()
    console.until(lambda: len(console.all(".chips li")) == 1)
    console.click("#send")
    console.until(lambda: console.rows(".answer [aria-label=Items]"))


@pytest.mark.parametrize(
    ("wrong", "said", "under"),
    [("genre:crime AND AND", "expected a term", "A"), ("colour:red", "unknown column `colour`", None), ("(genre:crime", "expected", "⏎")],
)
def test_a_wrong_filter_says_what_and_where(console: Console, wrong: str, said: str, under: str | None) -> None:
    console.open(model="books").filter(wrong)
    console.until(lambda: said in console.text("#filter .problem"))
    if under:
        assert console.text("#filter .problem mark") == under
    console.filter("genre:crime")
    console.until(lambda: f"about {BOOKS // 3} of {BOOKS} items pass" in console.text("#filter [role=status]"))


def test_filters_are_completed_by_the_keyboard(console: Console) -> None:
    console.open(model="books").filter("gen")
    console.until(lambda: console.all("#filter [role=option]"))
    field = console.one("#filter textarea")
    field.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    console.until(lambda: field.get_attribute("value") == "genre:")
    field.send_keys("po")
    console.until(lambda: [option.text.split()[0] for option in console.all("#filter [role=option]")] == ["poetry"])
    field.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    console.until(lambda: field.get_attribute("value") == "genre:poetry ")
    field.send_keys(Keys.ESCAPE)


def test_a_constant_of_the_value_model_ranks_again_at_once(console: Console) -> None:
    console.open(model="tiny")
    console.click("#send")
    console.until(lambda: console.rows(".answer [aria-label=Items]"))
    before = console.rows(".answer [aria-label=Items]")
    number = console.one("#constants input[type=number]")
    number.clear()
    number.send_keys("-7.5")
    console.until(lambda: console.rows(".answer [aria-label=Items]") != before)


def test_the_exact_answer_stands_beside(console: Console) -> None:
    console.open(model="books").vector(str(VECTOR))
    Select(console.one("#beside")).select_by_value("exact")
    console.click("#send")
    console.until(lambda: "recall" in console.text("#status"))
    assert len(console.all(".answer")) == 2
    exact, answer = (console.rows(f".answer:nth-child({n}) [aria-label=Items]") for n in (1, 2))
    shared = {row[1] for row in exact} & {row[2] for row in answer}
    assert f"{len(shared)} of the {len(exact)} in the other answer" in console.text("#status")
    console.picture("beside")


@pytest.mark.smoke
def test_versions_are_switched_and_labelled(console: Console, server: sterling.Server) -> None:
    def active() -> int:
        return next(v["version"] for v in server.get("/v1/models/books/versions")["versions"] if v["active"])

    def desired() -> int | None:
        return server.get("/v1/models/books/versions")["desired"].get("version")

    def press(text: str, version: int) -> None:
        row = next(row for row in console.all("#versions tbody tr") if row.text.split()[0] == str(version))
        next(button for button in row.find_elements(By.TAG_NAME, "button") if button.text == text).click()

    console.open("models", model="books")
    assert active() == 2
    console.until(lambda: press("activate", 1) is None)
    # One click changes nothing.
    console.until(lambda: "version 1 of books" in console.text("dialog"))
    next(button for button in console.all("dialog button") if button.text == "Cancel").click()
    console.until(lambda: not console.all("dialog"))
    assert active() == 2
    press("activate", 1)
    console.until(lambda: console.click("dialog button.main") is None)
    console.until(lambda: "books, version 1:" in console.text("#about"))
    assert active() == 1 and desired() is None
    console.until(lambda: "It differs: this server answers with version 1" in console.text("#versions"))
    console.one('[aria-label="new label of version 1"]').send_keys("canary")
    press("label", 1)
    console.until(lambda: console.all('[aria-label="remove the label canary"]'))
    assert server.get("/v1/models/books/labels")["labels"] == {"canary": 1}
    console.picture("versions")
    console.click('[aria-label="remove the label canary"]')
    console.until(lambda: not console.all('[aria-label="remove the label canary"]'))
    press("activate", 2)
    console.until(lambda: console.click("dialog input[value=store]") is None)
    console.click("dialog button.main")
    # The action takes effect at this server first, then in the store.
    console.until(lambda: active() == 2)
    console.until(lambda: desired() == 2)
    console.until(lambda: "Desired in the store: version 2 answers." in console.text("#versions"))
    assert "differs" not in console.text("#versions")
    subprocess.run([PROGRAM, "activate", "books", "newest", "--store", server.store], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def test_a_merged_version_stands_for_the_desired_one(chromium: webdriver.Chrome, tmp_path: pathlib.Path) -> None:
    store = tmp_path / "store"
    sterling.publish(ROOT / "tests/golden/tiny", store, program=PROGRAM)
    subprocess.run([PROGRAM, "activate", "tiny", "1", "--store", store], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    with sterling.serve(store, program=PROGRAM, settings={"STERLING_UPDATES": str(tmp_path / "updates")}) as server:
        server.post("/v1/models/tiny/items:delete", {"ids": [json.loads((ROOT / "tests/golden/tiny/items.jsonl").read_text().splitlines()[0])["id"]]})
        assert server.post("/v1/models/tiny/items:merge", {})["version"] == 2
        page = Console(chromium, server.url).open("models", model="tiny")
        page.until(lambda: "Desired in the store: version 1 answers." in page.text("#versions"))
        assert "differs" not in page.text("#versions")


def test_ids_and_times_beyond_the_integers_of_floats_are_exact(chromium: webdriver.Chrome, tmp_path: pathlib.Path) -> None:
    ids = [2**53 + 1 + 2 * n for n in range(4)]
    times = [1_768_907_725_507_217_523 + n for n in range(4)]
    package = tmp_path / "package"
    shutil.copytree(ROOT / "tests/golden/tiny", package)
    lines = (package / "items.jsonl").read_text().splitlines()
    items = [json.loads(line) | {"id": id} for line, id in zip(lines, ids)]
    for item, time in zip(items, times):
        item["attributes"] |= {"seen": time, "popularity": time % 100 + 1900.0}
    (package / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    with (package / "model.toml").open("a") as model:
        model.write('[[item.columns]]\nname = "seen"\n')
    sterling.publish(package, tmp_path / "store", program=PROGRAM)
    with sterling.serve(tmp_path / "store", program=PROGRAM) as server:
        page = Console(chromium, server.url).open(model="tiny")
        field = page.one("#features input[aria-label=installed]")
        field.send_keys(str(ids[0]), Keys.ENTER)
        page.until(lambda: page.text(".chips li").startswith(str(ids[0])))
        page.click("#send")
        page.until(lambda: page.rows(".answer [aria-label=Items]"))
        shown = {int(row[1]) for row in page.rows(".answer [aria-label=Items]")}
        # The item of the user is excluded by its exact id.
        assert shown == set(ids[1:])
        said = page.driver.execute_script("return [...document.querySelectorAll('.answer pre')].map(one => one.textContent)")
        assert f'"installed":[{ids[0]}]' in said[0] and all(f'"id": {id}' in said[1] for id in shown)
        page.open("index", model="tiny")
        choose = lambda name: [button.click() for button in page.all("#attributes button") if button.text == name]
        page.until(lambda: choose("seen"))
        page.until(lambda: {row[0] for row in page.rows("#values")} == {str(time) for time in times})
        # Years are shown without thousands separators.
        page.until(lambda: choose("popularity"))
        page.until(lambda: f"from {1900 + times[0] % 100} to {1900 + times[3] % 100}" in page.text("#values"))


def test_a_shadow_is_set_and_ended(console: Console, server: sterling.Server) -> None:
    wished = lambda: server.get("/v1/models/books/traffic").get("shadow", {}).get("setting")
    console.open("models", model="books")
    console.until(lambda: "no shadow" in console.text("#traffic") and "no canary" in console.text("#traffic"))
    console.click('[aria-label="set the shadow"]')
    console.until(lambda: "shadow: version" in console.text("#traffic"))
    assert wished() == {"version": 1, "share": 0.05, "per_second": 10.0}
    # No canary is possible while the newest version is active: the page reports it.
    console.click('[aria-label="set the canary"]')
    console.until(lambda: "sterling activate" in console.text("#trouble"))
    console.click('[aria-label="end the shadow"]')
    console.until(lambda: "no shadow" in console.text("#traffic"))
    assert wished() is None


def test_charts_show_what_happens(console: Console, server: sterling.Server) -> None:
    console.open("live", model="books")
    for _ in range(3):
        server.post("/v1/models/books:retrieve", {"vector": VECTOR})
        server.post("/v1/models/books/items:upsert", {"items": [{"id": 1, "set": {"pages": 51}}]})
        console.until(lambda: True)
    console.until(lambda: len(console.all("#charts figure svg path")) > 5, 60)
    named = [figure.text.split("\n")[0] for figure in console.all("#charts figure")]
    assert {"Answers per second", "Latency of passes, ms", "Items of the delta"} <= set(named)
    console.picture("live")


def test_before_there_was_traffic_charts_have_no_numbers(chromium: webdriver.Chrome, tmp_path: pathlib.Path) -> None:
    sterling.publish(ROOT / "tests/golden/tiny", tmp_path / "store", program=PROGRAM)
    with sterling.serve(tmp_path / "store", program=PROGRAM) as server:
        page = Console(chromium, server.url).open("live", model="tiny")
        page.until(lambda: len(page.all("#charts figure svg path")) > 2)
        text = page.driver.execute_script("return document.getElementById('charts').outerHTML")
        assert "NaN" not in text and "Infinity" not in text
        latency = next(figure for figure in page.all("#charts figure") if figure.text.startswith("Latency of passes"))
        assert "nothing yet" in latency.text


def test_a_chart_tells_the_values_at_the_pointer(console: Console, server: sterling.Server) -> None:
    console.open("live", model="books")
    console.until(lambda: console.all("#charts figure svg path"))
    picture = console.one("#charts figure svg")
    webdriver.ActionChains(console.driver).move_to_element(picture).perform()
    console.until(lambda: "s ago" in console.text("#charts figure .legend"))
    webdriver.ActionChains(console.driver).move_to_element(console.one("#about")).perform()
    console.until(lambda: "s ago" not in console.text("#charts figure .legend"))


def test_the_index_its_columns_and_the_tables(console: Console, server: sterling.Server) -> None:
    console.open("index", model="books")
    console.until(lambda: len(console.all("#shape figure svg")) >= 1)
    next(button for button in console.all("#attributes button") if button.text == "genre").click()
    console.until(lambda: console.rows("#values"))
    values = console.rows("#values")
    assert sorted(row[0] for row in values) == sorted(GENRES)
    assert all(row[2].startswith(f"{BOOKS // len(GENRES)} ") for row in values)
    console.picture("index")
    field = console.one("#browser input")
    field.send_keys("Book 17")
    console.until(lambda: console.text("#browser [role=option] span") == "Book 17")
    field.send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    console.until(lambda: ["genre", GENRES[17 % 3]] in console.rows("#browser"))
    assert {"id": "17", "title": "Book 17", "pages": "67", "price": "1.7"}.items() <= dict(console.rows("#browser")).items()
    field.clear()
    field.send_keys("29", Keys.ENTER)
    console.until(lambda: ["title", "Book 29"] in console.rows("#browser"))
    console.open("tables", model="tiny")
    tables = {table["name"] for table in server.get("/v1/models/tiny")["tables"]}
    console.until(lambda: {row[0] for row in console.rows("#plan")} == tables)


def test_a_plan_of_the_planner_is_a_picture(chromium: webdriver.Chrome, tmp_path: pathlib.Path) -> None:
    store, package = tmp_path / "store", ROOT / "tests/golden/tiny"
    sterling.publish(package, store, program=PROGRAM)
    made = subprocess.run([PROGRAM, "plan", store / "tiny/1", "--json"], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    plan = json.loads(made.stdout)
    # With one host the planner has no choice, so one of its tables is partitioned by hand.
    cut = next(table for table in plan["tables"] if table["table"] == "packages")
    whole = cut["shards"][0]
    cut |= {"sharding": "column_wise", "shards": [whole | {"columns": [0, 1]}, whole | {"columns": [1, 4]}]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    with sterling.serve(store, program=PROGRAM, settings={"STERLING_TABLES__PLAN": str(path)}) as running:
        page = Console(chromium, running.url).open(model="tiny")
        next(link for link in page.all("nav a") if link.text == "Tables").click()
        page.until(lambda: page.rows("#plan"))
        told = {table["name"]: table for table in running.get("/v1/models/tiny")["tables"]}
        assert {row[0]: row[-1] for row in page.rows("#plan")} == {name: table["placed"] for name, table in told.items()}
        assert told["packages"]["placed"].startswith("column_wise") and told["sections"]["placed"].startswith("table_wise")
        # One area per table, as wide as its share of the bytes, in the colour of its place.
        areas = {area.find_element(By.CSS_SELECTOR, "title").get_attribute("textContent"): area for area in page.all("#plan svg rect")}
        assert {said.split(":")[0] for said in areas} == set(told)
        all_bytes = sum(table["bytes"] for table in told.values())
        for said, area in areas.items():
            table = told[said.split(":")[0]]
            assert said.endswith(table["placed"])
            assert abs(float(area.get_attribute("width")) - 1000 * table["bytes"] / all_bytes) <= 2
        assert len({area.get_attribute("fill") for area in areas.values()}) == 2
        page.picture("plan")


def routed(servers: list[sterling.Server]) -> subprocess.Popen[str]:
    """Starts a router over servers."""
    command = [str(PROGRAM), "route", "--listen", "127.0.0.1:0", *(word for server in servers for word in ("--server", server.url.removeprefix("http://")))]
    quick = os.environ | {"STERLING_HTTP__DRAIN_MS": "0", "STERLING_ROUTE__REFRESH_MS": "100"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quick)


def test_the_shards_of_a_router(chromium: webdriver.Chrome, tmp_path: pathlib.Path) -> None:
    store = tmp_path / "store"
    cut = [PROGRAM, "publish", "--name", "books", "--items", shelf(tmp_path), "--store", store, "--shards", "2"]
    subprocess.run(cut, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    with contextlib.ExitStack() as stack:
        settings = [{"STERLING_SHARD": str(n), "STERLING_UPDATES": str(tmp_path / f"updates-{n}")} for n in range(2)]
        servers = [stack.enter_context(sterling.serve(store, program=PROGRAM, settings=its)) for its in settings]
        router = stack.enter_context(routed(servers))
        stack.callback(router.kill)
        page = Console(chromium, router.stdout.readline().split()[-1])
        page.until(lambda: page.open())
        next(link for link in page.all("nav a") if link.text == "Shards").click()
        page.until(lambda: len(page.rows("#shards")) == 2 and page.text("#shards .good") == "1 server")
        assert "100 % of its items" in page.text("#shards p")
        held = [server.get("/v1/models/books")["items"] for server in servers]
        assert sum(held) == BOOKS and [row[1] for row in page.rows("#shards")] == [str(items) for items in held]
        widths = [float(area.get_attribute("width")) for area in page.all("#shards svg rect")]
        assert all(abs(width - 1000 * items / BOOKS) <= 2 for width, items in zip(widths, held, strict=True))
        page.picture("shards")
        # The console of a router sends the same requests as that of a server.
        next(link for link in page.all("nav a") if link.text == "Query").click()
        page.until(lambda: page.one("#send").is_displayed())
        page.vector(str(VECTOR))
        page.click("#send")
        page.until(lambda: len(page.rows(".answer [aria-label=Items]")) > 1)
        # An update is visible in its shard; a lost server is reported.
        asked = urllib.request.Request(f"{page.url}/v1/models/books/items:delete", data=b'{"ids": [1, 2, 3]}', headers={"content-type": "application/json"})
        with urllib.request.urlopen(asked) as reply:
            positions = json.load(reply)["positions"]
        assert sum(positions) == 3
        next(link for link in page.all("nav a") if link.text == "Shards").click()
        page.until(lambda: [row[5] for row in page.rows("#shards")] == [str(position) for position in positions], 60)
        servers[1].close()
        page.until(lambda: [row[3] for row in page.rows("#shards")] == ["1 server", "no server"], 60)
        assert f"{100 * held[0] / BOOKS:.3g} %" in page.text("#shards p.bad")
        # Errors are shown above every page.
        page.until(lambda: page.text("#health") == "not ready" and "shard 1 of 2 of version 1 has no server that is ready" in page.text("#warnings"), 60)
        page.picture("shards-lost")


def test_markup_in_items_is_text(console: Console) -> None:
    console.open(model="books").filter("pages = 50")
    console.click("#send")
    console.until(lambda: "<img src=x" in console.text(".answer"))
    assert not console.all("img") and console.driver.title == "Sterling"


@pytest.mark.smoke
def test_no_page_logs_an_error_or_asks_another_host(console: Console) -> None:
    for page in PAGES:
        console.open(page, model="books")
        console.until(lambda: not console.one(f"#page-{page}").get_attribute("hidden"))
    assert console.severe() == []
    asked = console.driver.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    host = urllib.parse.urlsplit(console.url).netloc
    assert asked and {urllib.parse.urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {host}


# The phone profile of Lighthouse: a slow network, and a quarter of the CPU speed.
PHONE = {"offline": False, "latency": 150, "downloadThroughput": 1_638_400 / 8, "uploadThroughput": 768_000 / 8}


@pytest.mark.parametrize("machine", ["this machine", "a slow phone"])
def test_the_first_paint_takes_one_document_and_nothing_else(console: Console, machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the time (docs/benchmarks/http.md), and asserts its causes: bytes, earlier requests, blocking resources."""
    driver, paints = console.driver, []
    driver.execute_cdp_cmd("Network.enable", {})
    if machine == "a slow phone":
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", PHONE)
        driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", {"rate": 4})
    try:
        for _ in range(5):
            driver.get("about:blank")
            driver.execute_cdp_cmd("Network.clearBrowserCache", {})
            driver.get(console.url)
            console.until(lambda: driver.execute_script("return performance.getEntriesByName('first-contentful-paint').length"))
            document, painted, others = driver.execute_script(
                "return [performance.getEntriesByType('navigation')[0], performance.getEntriesByName('first-contentful-paint')[0].startTime,"
                " performance.getEntriesByType('resource')].map(of => JSON.parse(JSON.stringify(of)))"
            )
            paints.append(painted)
            # Bytes on the wire, including headers; they fit into the first round trips of a connection.
            assert 0 < document["transferSize"] < 48 << 10, document["transferSize"]
            assert document["contentEncoding"] in ("zstd", "gzip") and document["redirectCount"] == 0
            # Everything after the document is data that the script of the page requests.
            assert {other["initiatorType"] for other in others} <= {"fetch"}, others
            assert not [other["name"] for other in others if other["renderBlockingStatus"] != "non-blocking"]
    finally:
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", PHONE | {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1})
        driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", {"rate": 1})
    with capsys.disabled():
        told = ", ".join(f"{paint:.0f}" for paint in sorted(paints))
        print(f"\nfirst contentful paint on {machine}: {told} ms; {document['transferSize']} bytes of {document['decodedBodySize']}")


def test_a_server_that_does_not_answer_is_said(console: Console) -> None:
    console.open(model="books")
    console.driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    console.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        console.click("#send")
        console.until(lambda: "did not answer" in console.text(".answer .problem"))
    finally:
        console.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline | {"offline": False})
    console.click("#send")
    console.until(lambda: console.rows(".answer [aria-label=Items]"))


@pytest.mark.parametrize("page", PAGES)
def test_a_phone_shows_everything(console: Console, page: str) -> None:
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    console.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        console.open(page, model="tiny")
        if page == "query":
            console.click("#send")
            console.until(lambda: console.rows(".answer [aria-label=Items]"))
        wide, inner = console.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= inner, f"{wide} pixels of content on a screen of {inner}"
        if page == "models":
            console.until(lambda: console.all("#versions button"))
            beyond = console.driver.execute_script("return [...document.querySelectorAll('#versions button, #versions input')].filter(e => e.getBoundingClientRect().right > innerWidth).length")
            assert beyond == 0, "controls off the screen"
        if page in ("query", "index"):
            console.until(lambda: console.all(".bars td:first-child span"))
            # A name is wrapped only after its separators, never within a word.
            broken = (
                "const lines = text => { const range = document.createRange(); range.selectNode(text); return new Set([...range.getClientRects()].map(box => box.top)).size; };"
                "return [...document.querySelectorAll('.bars td:first-child span')].flatMap(e => [...e.childNodes])"
                ".filter(text => text.nodeType === Node.TEXT_NODE && lines(text) > text.data.split(' ').length).map(text => text.data)"
            )
            assert console.driver.execute_script(broken) == []
        console.picture(f"phone-{page}")
    finally:
        console.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("page", PAGES)
def test_every_control_is_reached_by_the_keyboard_and_has_a_name(console: Console, page: str) -> None:
    console.open(page, model="tiny")
    if page == "query":
        console.click("#send")
        console.until(lambda: console.rows(".answer [aria-label=Items]"))
    # Elements may be redrawn during the count.
    console.until(console.is_quiet)
    controls = "const all = [...document.querySelectorAll('a[href], button, input, select, textarea, summary')].filter(e => e.checkVisibility() && !e.disabled);"
    count, unnamed = console.driver.execute_script(
        controls + "all.forEach((e, n) => e.dataset.n = n);"
        "const name = e => e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent.trim();"
        "return [all.length, all.filter(e => !name(e)).map(e => e.outerHTML)];"
    )
    assert not unnamed
    console.driver.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
    reached, body = set(), console.one("body")
    for _ in range(2 * count + 20):
        webdriver.ActionChains(console.driver).send_keys(Keys.TAB).perform()
        reached.add(console.driver.execute_script("return document.activeElement.dataset.n"))
        if len(reached - {None}) == count:
            break
    assert body and len(reached - {None}) == count, f"{count - len(reached - {None})} of {count} are not reached"


CONTRAST = pathlib.Path(__file__).with_name("contrast.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_texts_stand_out_from_their_ground(console: Console, page: str, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    console.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    console.open(page, model="tiny")
    if page == "query":
        console.click("#send")
        console.until(lambda: console.rows(".answer [aria-label=Items]"))
        console.picture(f"{scheme}-query")
    texts, faint = console.driver.execute_script(CONTRAST)
    assert texts > 10 and not faint
    console.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_server_with_keys_is_unlocked_with_one(chromium: webdriver.Chrome, tmp_path: pathlib.Path) -> None:
    store, keys = tmp_path / "store", tmp_path / "keys.toml"
    sterling.publish(ROOT / "tests/golden/tiny", store, program=PROGRAM)
    make = [PROGRAM, "key", "person", "--file", keys]
    key = subprocess.run(make, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout.strip()
    # The start waits until models are ready; `/readyz` needs no key.
    with sterling.serve(store, program=PROGRAM, settings={"STERLING_ACCESS__KEYS": str(keys)}) as running:
        page = Console(chromium, running.url)
        chromium.get(running.url)
        page.until(lambda: page.one("#unlock").is_displayed())
        # A missing key is not an error yet.
        page.until(lambda: page.text("#absent") == "This server needs a key.")
        assert not page.all(".problem")
        page.one("#key").send_keys("stk_0", Keys.ENTER)
        page.until(lambda: page.one("#unlock").is_displayed() and "401" in page.text("#absent"))
        page.one("#key").clear()
        page.one("#key").send_keys(key, Keys.ENTER)
        page.until(lambda: "items in" in page.text("#about"))
        page.until(lambda: page.one("#key").get_attribute("value") == "")
        assert not page.one("#unlock").is_displayed()
        page.click("#send")
        page.until(lambda: page.rows(".answer [aria-label=Items]"))
