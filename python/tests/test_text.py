"""Texts: exported tokenizers against the ids and vectors of tests/golden/text, and the package of models/search."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
import sterling
from sterling import ExportError, Table, Text

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
tokenizers = pytest.importorskip("tokenizers")

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/text"


class Projection(torch.nn.Module):
    def __init__(self, output):
        super().__init__()
        self.linear, self.output = torch.nn.Linear(8, 4), output

    def forward(self, text):
        return {self.output: self.linear(text)}


def export(path, tokenizer, length=6, program=False):
    weight = torch.randn(400, 8, generator=torch.manual_seed(1))
    text = Text("text", "words", "mean", length=length)
    rows = [{"id": n, "text": f"item {n} of the model"} for n in range(20)]
    samples = [{"text": "serve a model"}, {"text": ""}, {}, {"text": "Zürich 🦀 " * 40}]
    return sterling.export(
        path, user=Projection("query"), item=Projection("item"), tables={"words": Table(weight, tokenizer=tokenizer)},
        features={"user": [text], "item": [text]}, items=rows, samples=samples, program=program,
    )  # fmt: skip


def test_texts_are_served_as_pytorch_has_them(tmp_path, program):
    made = export(tmp_path / "texts", GOLDEN / "wordpiece.json", program=program)
    assert made.largest < 1e-4, str(made)


def test_a_tokenizer_is_a_path_a_text_or_an_object(tmp_path):
    path = GOLDEN / "bpe.json"
    given = [path, str(path), path.read_text(encoding="utf-8"), tokenizers.Tokenizer.from_file(str(path))]
    queries = []
    for n, tokenizer in enumerate(given):
        made = export(tmp_path / f"texts{n}", tokenizer)
        assert json.loads((made.path / "words.tokenizer.json").read_text(encoding="utf-8"))["model"]["type"] == "BPE"
        queries.append(made.reference.queries([{"text": "publish"}]))
    assert len({query.tobytes() for query in queries}) == 1


def test_wrong_tokenizers_and_lengths_are_refused(tmp_path):
    with pytest.raises(ExportError, match="table `words` has no tokenizer"):
        export(tmp_path / "texts", None)
    with pytest.raises(ExportError, match="expected a tokenizer.json or a fast tokenizer"):
        export(tmp_path / "texts", tmp_path / "absent.json")
    with pytest.raises(ExportError, match="pooling `mean` with length None, expected a length"):
        export(tmp_path / "texts", GOLDEN / "bpe.json", length=None)


@pytest.mark.skipif(importlib.util.find_spec("wordllama") is None, reason="wordllama is not installed")
def test_the_search_package_embeds_as_wordllama_does(tmp_path, program):
    """`models/search/golden.json` holds vectors of the library itself, scaled to length 1."""
    spec = importlib.util.spec_from_file_location("make_search", ROOT / "models/search/make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    golden = json.loads((ROOT / "models/search/golden.json").read_text(encoding="utf-8"))
    items = [{"id": n, "name": f"document {n}", "text": case["text"]} for n, case in enumerate(golden)]
    made = make.export(tmp_path / "search", items, [], None)
    expected = np.array([case["vector"] for case in golden])
    assert np.abs(made.reference.queries([{"text": case["text"]} for case in golden]) - expected).max() < 1e-3
    sterling.publish(made.path, tmp_path / "store", program=program)
    with sterling.serve(tmp_path / "store", program=program) as server, sterling.Client(server.url) as client:
        for n, case in enumerate(golden):
            assert np.abs(client.embed("search", features={"text": case["text"]}) - expected[n]).max() < 1e-3
            assert client.retrieve("search", features={"text": case["text"]}, k=1).ids[0] == n
