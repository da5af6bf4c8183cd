"""The client with a real server, and with an overloaded one."""

import gzip
import http.server
import json
import multiprocessing
import ssl
import threading

import numpy as np
import pytest
import sterling

httpx = pytest.importorskip("httpx")

FEATURES = {"installed": np.array([1, 2]), "size": np.array([0.5, 0.25, 1.0], np.float32)}


def test_retrieve_rank_and_embed_agree(server):
    with sterling.Client(server.url) as client:
        query = client.embed("tiny", FEATURES)
        assert query.dtype == np.float32 and query.shape == (4,)
        best = client.retrieve("tiny", features=FEATURES, k=5, candidates=13, exact=True, columns=["section"])
        by_vector = client.retrieve("tiny", vector=query, k=5, candidates=13, exact=True)
        assert best.ids.tolist() == by_vector.ids.tolist() and np.allclose(best.scores, by_vector.scores, atol=1e-5)
        assert (best.model, best.version) == ("tiny", 1) and set(best.tasks) == {"click", "buy"} and len(best.columns["section"]) == 5
        assert (np.diff(best.scores) <= 0).all() and best.ids.dtype == np.int64
        ranked = client.rank("tiny", best.ids, features=FEATURES)
        assert ranked.ids.tolist() == best.ids.tolist() and np.allclose(ranked.scores, best.scores, atol=1e-5)
        assert len(client.retrieve("tiny", features=FEATURES, filter="section:nothing")) == 0


def test_every_form_of_an_answer_says_the_same(server):
    pytest.importorskip("pyarrow")
    asked = {"features": FEATURES, "k": 7, "candidates": 13, "exact": True, "columns": ["section", "popularity"]}
    with sterling.Client(server.url) as plain:
        wanted = plain.retrieve("tiny", **asked)
    for options in ({"arrow": True}, {"compression": True}, {"arrow": True, "compression": True}):
        with sterling.Client(server.url, **options) as client:
            found = client.retrieve("tiny", **asked)
            for name in ("ids", "scores", "similarities"):
                got, want = getattr(found, name), getattr(wanted, name)
                assert got.dtype == want.dtype and (got == want).all()
            assert {name: scores.tolist() for name, scores in found.tasks.items()} == {name: scores.tolist() for name, scores in wanted.tasks.items()}
            assert (found.columns, found.digest, found.position) == (wanted.columns, wanted.digest, wanted.position)
            assert len(client.retrieve("tiny", features=FEATURES, filter="section:nothing")) == 0
            assert len(client.retrieve("tiny", features=FEATURES, exclude=list(range(20_000, 40_000)), k=3)) == 3
            with pytest.raises(sterling.RequestError, match="field `k`"):
                client.retrieve("tiny", features=FEATURES, k=0)


@pytest.fixture(params=["arrow", "lists as arrow", "json"])
def options(request, monkeypatch):
    if request.param == "json":
        monkeypatch.setattr("sterling.client.is_there", lambda: False)
    else:
        pytest.importorskip("pyarrow")
    return {"arrow": request.param == "arrow"}


def test_many_users_are_answered_as_each_alone(server, options):
    users = {"installed": [[1, 2], [], [3], [1]], "size": np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)}
    told = []
    with sterling.Client(server.url, **options) as client:
        alone = [client.retrieve("tiny", features={name: rows[n] for name, rows in users.items()}, k=5, columns=["section"]) for n in range(4)]
        found = client.retrieve_many("tiny", features=users, k=5, columns=["section"], progress=lambda *counts: told.append(counts))
        assert told == [(4, 4)]
        for one, many in zip(alone, found, strict=True):
            assert one.ids.tolist() == many.ids.tolist() and np.allclose(one.scores, many.scores, atol=1e-5) and one.columns == many.columns
            assert (many.model, many.version, many.digest) == (one.model, one.version, one.digest)
        # Vectors, some with their own filter or excluded items; an invalid one fails alone.
        vectors = np.stack([client.embed("tiny", {name: rows[n] for name, rows in users.items()}) for n in range(4)])
        first = found[0].ids[0]
        narrowed = client.retrieve_many("tiny", vectors=vectors, filters=[None, "section:", None, "section:nothing"], excludes=[[first], None, [], None], k=3)
        assert first not in narrowed[0].ids and len(narrowed[0]) == 3
        assert isinstance(narrowed[1], sterling.RequestError) and narrowed[1].status == 400
        assert (len(narrowed[2]), len(narrowed[3])) == (3, 0)
        assert client.retrieve_many("tiny", vectors=np.zeros((0, 4))) == []
        with pytest.raises(ValueError, match="as many values in each column"):
            client.retrieve_many("tiny", vectors=vectors, filters=[None])
        with pytest.raises(ValueError, match=r"expected \[B, D\]"):
            client.retrieve_many("tiny", vectors=vectors[0])


def test_more_than_a_body_takes_goes_in_several(server, options, monkeypatch):
    monkeypatch.setattr("sterling.client.REQUESTS_MAX", 3)
    vectors, told = np.random.default_rng(2).normal(size=(8, 4)), []
    with sterling.Client(server.url, **options) as client:
        found = client.retrieve_many("tiny", vectors=vectors, k=2, exact=True, progress=lambda *counts: told.append(counts))
        assert told == [(3, 8), (6, 8), (8, 8)]
        assert [one.ids.tolist() for one in found] == [client.retrieve("tiny", vector=vector, k=2, exact=True).ids.tolist() for vector in vectors]


def test_items_are_put_and_changed(store, program, tmp_path, options, monkeypatch):
    monkeypatch.setattr("sterling.client.ITEMS_MAX", 2)
    with sterling.serve(store, program=program, settings={"STERLING_UPDATES": str(tmp_path)}) as server, sterling.Client(server.url, **options) as client:
        ids = client.retrieve("tiny", features=FEATURES, k=4).ids
        told = []
        made = client.upsert("tiny", [*ids[:3], 99], changes={"popularity": [7, 8, None, 9]}, key="once", progress=lambda *counts: told.append(counts))
        assert (made.accepted, told) == (3, [(2, 4), (4, 4)])
        assert [(item["place"], item["id"], item["field"]) for item in made.refused] == [(3, 99, "id")]
        again = client.upsert("tiny", [*ids[:3], 99], changes={"popularity": [7, 8, None, 9]}, key="once")
        assert again.position == made.position
        attributes = [server.get(f"/v1/models/tiny/items/{item}?min_position={made.position}")["attributes"] for item in ids]
        assert [one["popularity"] for one in attributes[:3]] == [7, 8, None] and attributes[3]["section"] is not None
        # A client reads its own writes in every call.
        made = client.upsert("tiny", ids[:1], changes={"popularity": [11]})
        own = {"min_position": made.position, "columns": ["popularity"]}
        eleven = own | {"k": 50, "candidates": 50, "filter": "popularity >= 11 AND popularity <= 11"}
        has_it = lambda found: dict(zip(found.ids, found.columns["popularity"], strict=True)).get(ids[0]) == 11  # noqa: E731
        assert has_it(client.retrieve("tiny", features=FEATURES, min_coverage=1.0, **eleven))
        assert has_it(next(client.pages("tiny", features=FEATURES, **eleven)))
        assert has_it(client.retrieve_many("tiny", features={name: [value] for name, value in FEATURES.items()}, **eleven)[0])
        assert has_it(client.rank("tiny", ids, features=FEATURES, **own))
        with pytest.raises(ValueError, match="expected changes, or"):
            client.upsert("tiny", ids, changes={}, attributes={})


def test_positions_of_several_calls_are_the_furthest_of_each_shard(monkeypatch):
    monkeypatch.setattr("sterling.client.ITEMS_MAX", 1)
    answers = iter([{"position": 5, "positions": [5, 0, 9]}, {"position": 7, "positions": [0, 7, 0]}, {"position": 8, "positions": [8, 0, 8]}])

    class Told:
        def json(self):
            return {"accepted": 1, "refused": [], **next(answers)}

    with sterling.Client("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client, "_table", lambda *_: Told())
        made = client.upsert("m", [1, 2, 3], changes={"a": [1, 2, 3]})
    assert (made.accepted, made.positions, made.position) == (3, [8, 7, 9], 7)


def test_pages_are_slices_of_one_ranking(server):
    asked = {"features": FEATURES, "candidates": 12, "exact": True}
    with sterling.Client(server.url) as client:
        whole = client.retrieve("tiny", k=12, **asked)
        pages = list(client.pages("tiny", k=5, **asked))
        assert [len(page) for page in pages] == [5, 5, 2] and pages[-1].cursor is None
        assert np.concatenate([page.ids for page in pages]).tolist() == whole.ids.tolist()


def test_items_become_a_data_frame(server):
    pytest.importorskip("pandas")
    with sterling.Client(server.url) as client:
        frame = client.retrieve("tiny", features=FEATURES, k=3, columns=["section"]).to_pandas()
    assert list(frame.columns) == ["id", "score", "similarity", "tasks.buy", "tasks.click", "columns.section"] or len(frame.columns) == 6
    assert len(frame) == 3


def test_traffic_is_told_and_changed_by_who_has_read_it_last(server):
    with sterling.Client(server.url) as client:
        plain = client.retrieve("tiny", features=FEATURES, k=5)
        assert (client.retrieve("tiny", features=FEATURES, k=5, sticky="user-1").ids == plain.ids).all()
        assert client.traffic("tiny") == {"model": "tiny", "revision": 0, "active": 1}
        with pytest.raises(sterling.RequestError, match="version 9") as refused:
            client.set_traffic("tiny", shadow={"version": 9, "share": 0.5})
        assert refused.value.status == 404
        told = client.set_traffic("tiny", shadow={"version": 1, "share": 0.5, "per_second": 5}, revision=0)
        # The shadow version is the one that answers anyway.
        assert told["shadow"] == {"setting": {"version": 1, "share": 0.5, "per_second": 5.0}} and told["revision"] == 1
        with pytest.raises(sterling.RequestError, match="sterling activate"):
            client.set_traffic("tiny", canary={"version": 1, "share": 0.5})
        with pytest.raises(sterling.RequestError, match="expected revision 0") as refused:
            client.set_traffic("tiny", revision=0)
        assert refused.value.status == 409
        assert "shadow" not in client.set_traffic("tiny", revision=1)


def test_what_is_wrong_is_told_and_not_sent_again(server):
    with sterling.Client(server.url) as client:
        with pytest.raises(sterling.RequestError, match="field `k`") as wrong:
            client.retrieve("tiny", features=FEATURES, k=0)
        assert wrong.value.status == 400
        with pytest.raises(sterling.RequestError, match="404"):
            client.embed("other", FEATURES)
        with pytest.raises(ValueError, match="features or a vector"):
            client.retrieve("tiny")
        # Invalid model names are still one segment of the path, without a query string.
        for name in ("tiny?x=1", "tiny#", "ti ny", "tiny%2F"):
            with pytest.raises(sterling.RequestError, match="404") as wrong:
                client.retrieve(name, features=FEATURES)
            assert f"`{name}` is not served here" in str(wrong.value)
        assert len(client.retrieve("tiny/versions/1", features=FEATURES, k=1).ids) == 1
        # Ids are never rounded.
        for ids in ([1.5], [{"id": 1}], ["1"], [[1]], [True], 1, np.array([1 << 63], np.uint64), [float("nan")]):
            with pytest.raises(ValueError, match="ids: got .* expected a list of 64-bit integers"):
                client.upsert("tiny", ids, changes={"a": [1]})


class Busy(http.server.BaseHTTPRequestHandler):
    """Rejects some requests with a status, then answers."""

    refusals, after, status = 2, "0", 503

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        is_refused, type(self).refusals = self.refusals > 0, self.refusals - 1
        body = {"code": "overloaded", "detail": "full", "retryable": True} if is_refused else {"embedding": [0.5]}
        data = json.dumps(body).encode()
        self.send_response(self.status if is_refused else 200)
        if is_refused and self.after:
            self.send_header("Retry-After", self.after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def busy():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_without_time_is_asked_again_and_not_for_ever(busy):
    Busy.refusals, Busy.after = 2, "0"
    with sterling.Client(busy, retries=2) as client:
        assert client.embed("any", {}).tolist() == [0.5]
    Busy.refusals = 2
    with sterling.Client(busy, retries=1) as client, pytest.raises(sterling.RequestError, match="overloaded: full"):
        client.embed("any", {})
    Busy.refusals, Busy.after = 1, "3600"
    with sterling.Client(busy) as client, pytest.raises(sterling.RequestError) as refused:
        client.embed("any", {})
    assert refused.value.retry_after == 3600 and refused.value.retryable


@pytest.fixture
def pauses(monkeypatch):
    """Seconds for which the client waited, without waiting."""
    waited, now = [], [1000.0]

    class Clock:
        @staticmethod
        def monotonic():
            return now[0]

        @staticmethod
        def sleep(seconds):
            waited.append(seconds)
            now[0] += seconds

    monkeypatch.setattr("sterling.client.time", Clock)
    return waited


@pytest.mark.parametrize("status", [429, 503])
def test_rejections_are_repeated_within_the_time_of_the_call(busy, pauses, monkeypatch, status):
    monkeypatch.setattr(Busy, "status", status)

    def call(refusals, after, timeout_ms=None, **options):
        Busy.refusals, Busy.after = refusals, after
        pauses.clear()
        with sterling.Client(busy, **options) as client:
            answer = client._call("POST", "any:embed", {} if timeout_ms is None else {"timeout_ms": timeout_ms})
        assert answer.status_code == 200
        return list(pauses)

    assert call(3, "2") == [2, 2, 2]
    assert call(2, None) == [1, 1], "no Retry-After"
    assert call(1, "2", timeout_ms=2500) == [2]
    for options in [{"refusals": 4, "after": "1"}, {"refusals": 1, "after": "2", "timeout_ms": 2000}, {"refusals": 1, "after": "10"}]:
        with pytest.raises(sterling.RequestError) as refused:
            call(**options)
        assert refused.value.status == status
    with pytest.raises(sterling.RequestError):
        call(3, "4", timeout=10)
    assert pauses == [4, 4], "a third retry would begin after 12 seconds"
    with pytest.raises(sterling.RequestError):
        call(3, "4", patience=5)
    assert pauses == [4]


@pytest.mark.parametrize("status", [400, 408, 500, 504])
def test_other_statuses_are_not_repeated(busy, pauses, monkeypatch, status):
    monkeypatch.setattr(Busy, "status", status)
    Busy.refusals, Busy.after = 1, "1"
    with sterling.Client(busy) as client, pytest.raises(sterling.RequestError):
        client.embed("any", {})
    assert pauses == []


class Guarded(http.server.BaseHTTPRequestHandler):
    """Answers with the caller's key, the coding of the body, and the name in the client's certificate."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        coding = self.headers.get("Content-Encoding", "none")
        json.loads(gzip.decompress(body) if coding == "gzip" else body)
        shown = getattr(self.connection, "getpeercert", dict)() or {}
        told = [self.headers.get("Authorization", "none"), coding, self.headers["Accept-Encoding"], shown.get("subject") is not None]
        data = json.dumps({"code": "reported", "detail": json.dumps(told)}).encode()
        self.send_response(418)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    log_message = Busy.log_message


def told(client, features):
    with client, pytest.raises(sterling.RequestError) as refused:
        client.embed("any", features)
    return json.loads(str(refused.value).removeprefix("418 reported: "))


@pytest.mark.parametrize("wants_certificate", [False, True])
def test_keys_codings_and_certificates_are_shown(tiny, wants_certificate):
    folder = tiny.parent / "tls"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    if wants_certificate:
        context.load_verify_locations(folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_address[1]}"
        own = {"ca": folder / "ca.pem", "certificate": (folder / "client.pem", folder / "client.key") if wants_certificate else None}
        small, large = {"a": [1]}, {"a": list(range(20_000))}
        assert told(sterling.Client(url, **own), small) == ["none", "none", "identity", wants_certificate]
        assert told(sterling.Client(url, **own, api_key="k", compression=True), small) == ["Bearer k", "none", "gzip", wants_certificate]
        assert told(sterling.Client(url, **own, compression=True), large)[1] == "gzip"
        for wrong in [{}] + [own | {"certificate": None}] * wants_certificate:
            with sterling.Client(url, **wrong) as client, pytest.raises(sterling.ConnectionFailed) as failed:
                client.embed("any", small)
            assert isinstance(failed.value.__cause__, httpx.TransportError)
        server.shutdown()


class Ports(http.server.BaseHTTPRequestHandler):
    """Answers with the port of the client's connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        data = json.dumps({"embedding": [self.client_address[1]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    log_message = Busy.log_message


@pytest.fixture
def ports():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ports) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_forked_process_has_connections_of_its_own(ports):
    fork = multiprocessing.get_context("fork")
    with sterling.Client(ports) as client:
        port = lambda: int(client.embed("any", {})[0])  # noqa: E731
        own = port()
        assert port() == own, "a connection is used again"
        reader, writer = fork.Pipe(duplex=False)

        def ask() -> None:
            writer.send([port(), port()])
            client.close()

        children = [fork.Process(target=ask) for _ in range(3)]
        for child in children:
            child.start()
        others = [reader.recv() for _ in children]
        for child in children:
            child.join(30)
            assert child.exitcode == 0
        assert all(one == two != own for one, two in others) and len({one for one, _ in others}) == 3
        assert port() == own, "no child has closed it"
    child = fork.Process(target=lambda: port())
    child.start()
    child.join(30)
    assert child.exitcode == 1, "a closed client is closed in all processes"


def test_a_history_without_ids_has_no_type(server, options):
    none, one = np.array([]), np.array([1, 2])
    with sterling.Client(server.url, **options) as client:
        ids = lambda **features: client.retrieve("tiny", features=features, k=3).ids.tolist()  # noqa: E731
        wanted = ids(installed=[])
        assert ids(installed=none) == wanted == ids(installed=none.astype(np.int64))
        for histories in ([one, none], [none, none], [[], []], [none]):
            found = client.retrieve_many("tiny", features={"installed": histories}, k=3)
            assert [answer.ids.tolist() for answer in found] == [ids(installed=list(map(int, history))) for history in histories]


def test_explanations_and_unknown_ids_are_kept(server, options):
    with sterling.Client(server.url, **options) as client:
        plain = client.retrieve("tiny", features=FEATURES, k=3)
        assert (plain.explain, plain.unknown) == (None, [])
        assert "steps" in client.retrieve("tiny", features=FEATURES, k=3, explain=True).explain
        assert client.rank("tiny", [*plain.ids[:1], 987_654], features=FEATURES).unknown == [987_654]


def test_values_of_data_frames_are_taken(server, options):
    pandas = pytest.importorskip("pandas")
    with sterling.Client(server.url, **options) as client:
        found = client.retrieve("tiny", features={"installed": pandas.Series([1, 2])}, exclude=pandas.Series([3]), k=3)
        assert found.ids.tolist() == client.retrieve("tiny", features={"installed": [1, 2]}, exclude=[3], k=3).ids.tolist()
        users = pandas.DataFrame({"installed": [[1, 2], np.array([]), [3]]})
        answers = client.retrieve_many("tiny", features=users, k=3)
        assert [len(answer) for answer in answers] == [3, 3, 3]


class Answer:
    def __init__(self, body):
        self.json = lambda: body


def test_positions_of_several_bodies_are_those_of_each_shard(monkeypatch):
    told = iter([{"accepted": 10_000, "refused": [], "position": 5, "positions": [5, 7, 6]}, {"accepted": 1, "refused": [], "position": 1, "positions": [0, 8, 0]}])
    with sterling.Client("http://127.0.0.1:1") as client:
        monkeypatch.setattr(client, "_table", lambda *_: Answer(next(told)))
        made = client.upsert("any", np.arange(10_001), changes={"a": [1] * 10_001})
    assert (made.accepted, made.position, made.positions) == (10_001, 5, [5, 8, 6])


def test_arguments_that_make_no_call_are_told_by_name(server):
    for wrong, said in [({"timeout": 0}, "timeout: got 0"), ({"retries": -1}, "retries: got -1"), ({"api_key": "é"}, "api_key: got 'é'")]:
        with pytest.raises(ValueError, match=said):
            sterling.Client(server.url, **wrong)
    with pytest.raises(ValueError, match="url: got 'localhost:8080', expected one that begins with http://"):
        sterling.Client("localhost:8080")
    with sterling.Client(server.url) as client:
        with pytest.raises(ValueError, match="sticky: got 'é'"):
            client.retrieve("tiny", features=FEATURES, sticky="é")
        with pytest.raises(ValueError, match=r"vector: got shape \[2, 2\]"):
            client.retrieve("tiny", vector=np.zeros((2, 2)))
        for name, call in [
            ("vector", lambda numbers: client.retrieve("tiny", vector=numbers[0])),
            ("vectors", lambda numbers: client.retrieve_many("tiny", vectors=numbers)),
            ("embeddings", lambda numbers: client.upsert("tiny", [1], embeddings=numbers)),
        ]:
            with pytest.raises(ValueError, match=f"^{name}: got complex64, expected real numbers"):
                call(np.ones((1, 2), np.complex64))
    # A port without a listener.
    with sterling.Client("http://127.0.0.1:1") as client, pytest.raises(sterling.ConnectionFailed, match="POST http://127.0.0.1:1/v1/models/any:embed: ConnectError"):
        client.embed("any", {})


def test_a_call_may_last_as_long_as_its_own_time(monkeypatch):
    asked = []
    with sterling.Client("http://127.0.0.1:1", timeout=2) as client:
        monkeypatch.setattr(client._http, "request", lambda *_, timeout, **__: asked.append(timeout) or httpx.Response(200, json={"embedding": [1]}))
        client._call("POST", "any:embed", {"timeout_ms": 60_000})
        client._call("POST", "any:embed", {"timeout_ms": np.int64(60_000)})
        client._call("POST", "any:embed", {"timeout_ms": 100})
        client._call("POST", "any:embed", {})
    assert asked == [61, 61, 2, 2]
