"""The client against a real server, and against one that has no time."""

import http.server
import json
import threading

import numpy as np
import pytest
import sterling

pytest.importorskip("httpx")

FEATURES = {"installed": np.array([1, 2]), "size": np.array([0.5, 0.25, 1.0], np.float32)}


@pytest.fixture(scope="module")
def server(store, program):
    with sterling.serve(store, program=program) as server:
        yield server


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


def test_what_is_wrong_is_told_and_not_sent_again(server):
    with sterling.Client(server.url) as client:
        with pytest.raises(sterling.RequestError, match="field `k`") as wrong:
            client.retrieve("tiny", features=FEATURES, k=0)
        assert wrong.value.status == 400
        with pytest.raises(sterling.RequestError, match="404"):
            client.embed("other", FEATURES)
        with pytest.raises(ValueError, match="features or a vector"):
            client.retrieve("tiny")


class Busy(http.server.BaseHTTPRequestHandler):
    refusals, after = 2, "0"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        is_refused, type(self).refusals = self.refusals > 0, self.refusals - 1
        body = {"code": "overloaded", "detail": "full", "retryable": True} if is_refused else {"embedding": [0.5]}
        data = json.dumps(body).encode()
        self.send_response(503 if is_refused else 200)
        if is_refused:
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
