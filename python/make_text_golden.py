"""Writes the text package of the tests: python/make_text_golden.py [OUT=tests/golden/text]

OUT receives a WordPiece, a byte-level BPE and a Unigram tokenizer, trained on the pages of docs/guide; tokens.json, texts with the
ids that the Python package `tokenizers` computes for them; a package whose towers read three text features, with items; and
answers.json, the queries and item vectors that numpy computes from these ids. Tables are derived from SEED; training breaks ties
between tokens differently in each run.

Needs numpy, onnx, safetensors and tokenizers.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).parent.parent
SEED, D, WIDTH = 7, 4, 8
TITLE, TEXT, BODY = 6, 12, 16
TEXTS = [
    "",
    " ",
    "a",
    "Publish a model package and serve it.",
    "  two  spaces,\ttabs\nand lines ",
    "Zürich, ﬁne café; naïve ÀÉÎ",
    "日本語のテキスト と 한국어",
    "🦀 emoji 👩‍👩‍👧‍👦 family",
    "[CLS] special [SEP] <s> tokens </s>",
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 4,
    "\u0000\u200b\ufffd control",
    "The recall of a search is the share of the best items that it finds. " * 8,
]
MODEL = f"""\
# Written by python/make_text_golden.py.
name = "text"
description = "Text features of the tests."
dimension = {D}

[[tables]]
name = "words"
file = "tables.safetensors"
tokenizer = "wordpiece.json"

[[tables]]
name = "bytes"
file = "tables.safetensors"
tokenizer = "bpe.json"

[[tables]]
name = "pieces"
file = "tables.safetensors"
tokenizer = "unigram.json"

[user]
tower = "user.onnx"

[[user.features]]
name = "text"
kind = "text"
table = "words"
pooling = "none"
length = {TEXT}

[[user.features]]
name = "title"
kind = "text"
table = "bytes"
pooling = "mean"
length = {TITLE}

[item]
tower = "item.onnx"

[[item.features]]
name = "body"
kind = "text"
table = "pieces"
length = {BODY}
keep = "last"

[[item.columns]]
name = "kind"
"""


def trained(model, trainer, normalizer, pre_tokenizer, template):
    """Returns a tokenizer trained on the guide."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train([str(page) for page in sorted((ROOT / "docs/guide").glob("*.md"))], trainer)
    special = [(token, tokenizer.token_to_id(token)) for token in template.split() if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def tokenizer_files():
    word_piece = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        "[CLS] $A [SEP]",
    )
    bpe = trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
        None,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        "<s> $A </s>",
    )
    unigram = trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizers.Metaspace(),
        "$A </s>",
    )
    return {"wordpiece": word_piece, "bpe": bpe, "unigram": unigram}


def ids(tokenizer, text, length, keep):
    """Returns the ids of a text's tokens, at most `length`."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(length, direction="right" if keep == "first" else "left")
    found = tokenizer.encode(text).ids
    tokenizer.no_truncation()
    return found


def graph(path, inputs, nodes, constants, output):
    """Writes a tower; inputs are names with their shapes after the row axis."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name, shape in inputs]
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", D])]
    values = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    model = helper.make_model(helper.make_graph(nodes, path.stem, ports, made, values), opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/golden/text"
    out.mkdir(parents=True, exist_ok=True)
    found = tokenizer_files()
    tokens = {}
    for name, tokenizer in found.items():
        tokenizer.save(str(out / f"{name}.json"), pretty=False)
        cases = [(text, length, keep) for text in TEXTS for length, keep in [(5, "first"), (5, "last"), (64, "first"), (4096, "last")]]
        tokens[name] = [{"text": t, "length": n, "keep": k, "ids": ids(tokenizer, t, n, k)} for t, n, k in cases]
    (out / "tokens.json").write_text(json.dumps({"tokenizers": tokenizers.__version__, "cases": tokens}, ensure_ascii=False) + "\n")

    random = np.random.default_rng(SEED)
    numbers = lambda *shape: random.integers(-64, 65, shape).astype(np.float32) / 64  # noqa: E731
    names = {"words": "wordpiece", "bytes": "bpe", "pieces": "unigram"}
    tables = {table: numbers(found[name].get_vocab_size(), WIDTH) for table, name in names.items()}
    save_file(tables, out / "tables.safetensors")
    of_text, of_title, of_body = numbers(WIDTH, D), numbers(WIDTH, D), numbers(WIDTH, D)
    node = helper.make_node
    graph(
        out / "user.onnx",
        [("text", [TEXT, WIDTH]), ("text_mask", [TEXT]), ("title", [WIDTH])],
        [
            node("ReduceSum", ["text", "axis"], ["sum"], keepdims=0),
            node("ReduceSum", ["text_mask", "axis"], ["tokens"], keepdims=1),
            node("Max", ["tokens", "one"], ["divisor"]),
            node("Div", ["sum", "divisor"], ["mean"]),
            node("MatMul", ["mean", "of_text"], ["a"]),
            node("MatMul", ["title", "of_title"], ["b"]),
            node("Add", ["a", "b"], ["query"]),
        ],
        {"axis": np.array([1]), "one": np.array([1.0], np.float32), "of_text": of_text, "of_title": of_title},
        "query",
    )
    graph(out / "item.onnx", [("body", [WIDTH])], [node("MatMul", ["body", "of_body"], ["item"])], {"of_body": of_body}, "item")
    (out / "model.toml").write_text(MODEL)

    mean = lambda rows: rows.sum(0) / max(len(rows), 1)  # noqa: E731

    def query(text, title):
        words = [] if text is None else ids(found["wordpiece"], text, TEXT, "first")
        pieces = [] if title is None else ids(found["bpe"], title, TITLE, "first")
        return (mean(tables["words"][words]) @ of_text + mean(tables["bytes"][pieces]) @ of_title).tolist()

    requests = [{"text": text} for text in TEXTS] + [{"title": text} for text in TEXTS] + [{}, {"text": TEXTS[3], "title": TEXTS[11]}]
    answers = [{"features": r, "query": query(r.get("text"), r.get("title"))} for r in requests]
    items, vectors = [], {}
    for n in range(40):
        body = f"{TEXTS[n % len(TEXTS)]} {n}"
        items.append({"id": n, "attributes": {"body": body, "kind": "even" if n % 2 == 0 else "odd"}})
        vectors[n] = (tables["pieces"][ids(found["unigram"], body, BODY, "last")].sum(0) @ of_body).tolist()
    (out / "items.jsonl").write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
    (out / "answers.json").write_text(json.dumps({"requests": answers, "items": vectors}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
