#!/usr/bin/env python3
"""Writes a semantic search package of WordLlama's embeddings and measures it on descriptions of Debian packages.

    pip install './python[export,client]' tokenizers pyarrow && pip install --no-deps wordllama
    python python/extract_debian.py DATA
    python models/search/make.py OUT --items DATA/items.parquet --program target/release/sterling

A document is the long description of a package, its query the short one. The script prints the share of queries whose document is
first, and among the first ten, of the package and of TF-IDF over the same documents. With the program the package is served too,
and its answers are compared.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import re
from collections import Counter

import numpy as np
import sterling
import torch
from safetensors.numpy import load_file

LENGTH = 512
SEED = 1


class Unit(torch.nn.Module):
    """Scales the mean of a text's token embeddings to length 1; a text without tokens stays zero."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output

    def forward(self, text: torch.Tensor) -> dict[str, torch.Tensor]:
        return {self.output: text / text.norm(dim=1, keepdim=True).clamp(min=1e-6)}


def weights() -> tuple[np.ndarray, str]:
    """Returns WordLlama's embeddings ``[32000, 256]`` and its tokenizer without the special token, as the library embeds texts."""
    spec = importlib.util.find_spec("wordllama")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("wordllama is not installed: pip install --no-deps wordllama")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    (table,) = load_file(folder / "weights/l2_supercat_256.safetensors").values()
    tokenizer = json.loads((folder / "tokenizers/l2_supercat_tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["post_processor"] = None
    return table, json.dumps(tokenizer, ensure_ascii=False)


def export(out: pathlib.Path, items: list[dict], samples: list[dict], program: pathlib.Path | None) -> sterling.Exported:
    """Writes the package; items have `text` and `name`."""
    table, tokenizer = weights()
    text = lambda: sterling.Text("text", "tokens", pooling="mean", length=LENGTH)  # noqa: E731
    return sterling.export(
        out, name="search", description="Semantic search: WordLlama's token embeddings, averaged", user=Unit("query"), item=Unit("item"),
        tables={"tokens": sterling.Table(table, tokenizer=tokenizer, storage="f16")}, features={"user": [text()], "item": [text()]},
        columns=[sterling.Column("name", filter=False)], items=items, samples=samples, program=program or False,
    )  # fmt: skip


def documents(path: pathlib.Path, count: int) -> list[tuple[str, str, str]]:
    """Returns names, short and long descriptions of packages, without repeated descriptions."""
    import pyarrow.parquet as parquet

    rows = parquet.read_table(path, columns=["name", "short", "long"]).to_pylist()
    shorts, longs = (Counter(row[field] for row in rows) for field in ("short", "long"))
    some = [(r["name"], r["short"], r["long"]) for r in rows if r["long"] and shorts[r["short"]] == 1 and longs[r["long"]] == 1]
    chosen = np.random.default_rng(SEED).permutation(len(some))[:count]
    return [some[n] for n in sorted(chosen)]


def shares(ranks: np.ndarray) -> str:
    return f"first {np.mean(ranks == 0):.3f}, among ten {np.mean(ranks < 10):.3f}"


def ranks(scores: np.ndarray) -> np.ndarray:
    """Returns the rank of document n for query n, from 0."""
    return (scores > np.diagonal(scores)[:, None]).sum(1)


def tfidf(queries: list[str], texts: list[str]) -> np.ndarray:
    """Returns cosines of TF-IDF vectors of words, ``[queries, texts]``."""
    words = lambda text: Counter(re.findall(r"\w+", text.lower()))  # noqa: E731
    bags = [words(text) for text in texts]
    documents_of = Counter(word for bag in bags for word in bag)
    idf = {word: math.log(len(texts) / n) for word, n in documents_of.items()}
    postings: dict[str, list[tuple[int, float]]] = {}
    for n, bag in enumerate(bags):
        weight = {word: (1 + math.log(count)) * idf[word] for word, count in bag.items()}
        norm = math.sqrt(sum(w * w for w in weight.values())) or 1.0
        for word, w in weight.items():
            postings.setdefault(word, []).append((n, w / norm))
    found = np.zeros((len(queries), len(texts)), np.float32)
    for n, query in enumerate(queries):
        for word, count in words(query).items():
            for document, w in postings.get(word, ()):
                found[n, document] += (1 + math.log(count)) * idf[word] * w
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--items", type=pathlib.Path, required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--program", type=pathlib.Path)
    options = parser.parse_args()
    names, short, long = map(list, zip(*documents(options.items, options.count)))
    items = [{"id": n, "name": name, "text": text} for n, (name, text) in enumerate(zip(names, long))]
    # Every other query calibrates the recall of a publication; the served recall is of the others.
    samples = [{"text": text} for text in short[::2][:512]]
    made = export(options.out, items, samples, None)
    queries, vectors = made.reference.queries([{"text": text} for text in short]), made.reference.items(items)
    print(f"{len(items)} documents")
    print("WordLlama:", shares(ranks(queries @ vectors.T)))
    print("TF-IDF:   ", shares(ranks(tfidf(short, long))))
    if options.program:
        served(options.out, options.program, short[1::2], queries[1::2], vectors)


def served(package: pathlib.Path, program: pathlib.Path, short: list[str], queries: np.ndarray, vectors: np.ndarray) -> None:
    """Publishes and serves the package; prints the share of the best ten documents that it returns."""
    import tempfile

    best = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    with tempfile.TemporaryDirectory() as folder:
        sterling.publish(package, folder, program=program)
        with sterling.serve(folder, program=program) as server:
            with sterling.Client(server.url) as client:
                found = [client.retrieve("search", features={"text": text}, k=10) for text in short]
    share = np.mean([len(set(answer.ids.tolist()) & set(wanted.tolist())) / 10 for answer, wanted in zip(found, best)])
    print(f"served:    recall@10 {share:.3f} of exact search in float32")


if __name__ == "__main__":
    main()
