#!/usr/bin/env python3
"""Compares first-pass codes with int8 rows alone and with other libraries, on real vectors: table and curves of
docs/benchmarks/quantization.md.

    python scripts/real_vectors.py words words.npy
    python scripts/bench_first_pass.py --sterling target/release/sterling --vectors words.npy [--peers faiss-sq8,faiss-pq,scann,hnswlib,svs]

The vectors are the rows of any `.npy` matrix (scripts/real_vectors.py makes some), normalized; --queries of these rows, sampled by a
seed, are held out as queries. Each library searches with one thread, one query at a time, over its own settings. The libraries alternate
--rounds times, and the median of the rounds counts for each setting. The table shows, for each number of results and each recall,
the fastest setting that reaches the recall, with the bytes read (Sterling only); the last column is the requested recall. `int8
beside CODES` scans int8 rows in the index that has the codes.
--folder holds the data and the indexes of peers, which --build makes without measuring. The folder also receives `curves.csv`, every
setting with its median, and `curves.svg`, the Pareto-optimal settings of each side.
With --filters it measures the cost of a request by recall in an index with codes and in an index without codes: K = 100 to 10,000, and K =
1,000 with filters that pass a half, a tenth, a hundredth and a thousandth of the items, independent of their vectors: the table
*Behind filters* of docs/benchmarks/quantization.md. Needs numpy, and of faiss-cpu, scann, hnswlib and scalable-vs the packages that
--peers names.
"""
import argparse, csv, json, math, os, pathlib, statistics, subprocess, time

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

KS = (10, 100, 1000)
KS_FILTERED = (100, 1000, 10_000)
TARGETS = (0.90, 0.95, 0.98)
PROBES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
FACTORS = (1.5, 2, 3, 4, 6, 8, 11, 16)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sterling", default="target/release/sterling", help="the binary")
    options.add_argument("--vectors", type=pathlib.Path, help="a .npy matrix; not needed if --folder was made from a matrix before")
    options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("bench-first-pass"))
    options.add_argument("--queries", type=int, default=500)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--codes", default="pq4", help="codes that are measured beside int8 rows")
    options.add_argument("--k", default=",".join(map(str, KS)), help="numbers of results")
    options.add_argument("--peers", default="", help="some of " + ",".join(PEERS))
    options.add_argument("--filters", action="store_true", help="only requests by recall, K = 10,000 and behind filters")
    options.add_argument("--build", action="store_true", help="only make data and the peers' indexes")
    given = options.parse_args()
    folder = given.folder
    if not (folder / "truth.npy").exists():
        if not given.vectors:
            raise SystemExit("expected --vectors")
        make(folder, np.load(given.vectors), given.queries)
    items, queries, truth = (np.load(folder / f"{name}.npy") for name in ("items", "queries", "truth"))
    print(json.dumps({"items": len(items), "width": items.shape[1], "queries": len(queries)}), flush=True)
    if given.filters:
        return behind_filters(given, items, queries)
    ks = [int(k) for k in given.k.split(",")]
    sides = {"int8": lambda: sterling(given, ks, None)}
    for codes in filter(None, given.codes.split(",")):
        sides[codes] = lambda codes=codes: sterling(given, ks, codes)
    for name in filter(None, given.peers.split(",")):
        peer = PEERS[name](items, folder / name)
        sides[name] = lambda peer=peer: searched(peer, ks, queries, truth)
    if given.build:
        return
    rows = {name: {} for name in sides}
    for _ in range(given.rounds):
        for name, side in sides.items():
            for row in side():
                rows.setdefault(row.get("side", name), {}).setdefault((row["k"], row["setting"]), []).append(row)
    rows = {name: [median(of) for of in rows.values()] for name, rows in rows.items()}
    tell(rows, ks)
    write(rows, folder / "curves.csv")
    draw(rows, ks, f"{len(items):,} x {items.shape[1]}, one thread", folder / "curves.svg")


def make(folder, rows, held_out):
    """Writes unit vectors, held-out queries, and the exact answers of these queries."""
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


def sterling(given, ks, codes):
    """Returns measurements of `sterling ann-bench` by number of lists, with codes also by number of selected items, and by
    recall."""
    command = [given.sterling, "ann-bench", "--rescore", "f16", "--queries-count", "0", "--k", ",".join(map(str, ks))]
    command += ["--probes", ",".join(map(str, PROBES)), "--recall", ",".join(map(str, TARGETS))]
    if codes:
        # 0 stands for int8 rows, in the same index that has the codes.
        command += ["--codes", codes, "--selected", ",".join(["0", *(f"{factor}x" for factor in FACTORS)])]
    for name in ("items", "queries", "truth"):
        command += [f"--{name}", str(given.folder / f"{name}.npy")]
    rows = []
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for line in map(json.loads, lines):
        if "qps" in line:
            setting = f"recall {line['target']}" if line["target"] else f"{line['probes']} lists"
            if line["selected_by_codes"]:
                setting += f", {line['selected_by_codes']} selected"
            elif codes and not line["target"]:
                line["side"] = f"int8 beside {codes}"
            rows.append({**line, "setting": setting, "bytes": line["bytes_read"]})
    return rows


def behind_filters(given, items, queries):
    """Measures requests by recall, with filters and at K = 10,000, alternating between indexes without and with codes."""
    folder, drawn = given.folder / "filters", np.random.default_rng(2)
    shares = {"none": 1, "half": 2, "tenth": 10, "hundredth": 100, "thousandth": 1000}
    attributes = np.stack([drawn.integers(0, of, len(items)) for of in shares.values()], axis=1).astype("i8")
    if not (folder / "truth.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "attributes.npy", attributes)
        filters = {name: {"expression": f"f{n}:0"} for n, name in enumerate(shares) if name != "none"}
        (folder / "filters.json").write_text(json.dumps(filters))
        truth = {name: np.full((len(queries), KS_FILTERED[-1]), -1, "i4") for name in shares}
        for n, query in enumerate(queries):
            order = np.argsort(-(items @ query), kind="stable")
            for column, name in enumerate(shares):
                passing = order[attributes[order, column] == 0][: KS_FILTERED[-1]]
                truth[name][n, : len(passing)] = passing
        for name, best in truth.items():
            np.save(folder / ("truth.npy" if name == "none" else f"truth_{name}.npy"), best)
    command = [given.sterling, "ann-bench", "--rescore", "f16", "--queries-count", "0", "--probes", "8", "--recall", ",".join(map(str, TARGETS[1:]))]
    command += ["--k", ",".join(map(str, KS_FILTERED)), "--filters", str(folder / "filters.json"), "--attributes", str(folder / "attributes.npy")]
    command += ["--items", str(given.folder / "items.npy"), "--queries", str(given.folder / "queries.npy"), "--truth", str(folder / "truth.npy")]
    found = {}
    for _ in range(given.rounds):
        for codes in ("none", *filter(None, given.codes.split(","))):
            lines = subprocess.run([*command, "--codes", codes], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            for row in filter(lambda row: row.get("target"), map(json.loads, lines)):
                found.setdefault((row["k"], row.get("filter") or "none", row["target"]), {}).setdefault(codes, []).append(row)
    print("| K | filter | recall | " + " | ".join(f"{codes} µs | found" for codes in next(iter(found.values()))) + " |")
    for (k, name, target), sides in found.items():
        told = (f"{1e6 / median(rows)['qps']:.0f} | {rows[0]['recall']:.4f}" for rows in sides.values())
        print(f"| {k:,} | {name} | {target} | " + " | ".join(told) + " |")


def lists_of(items):
    return int(4 * len(items) ** 0.5)


class Faiss:
    """An inverted file of Faiss, rescored with f32 rows if its codes are small. The numbers of lists and probes are Sterling's."""

    def __init__(self, items, path):
        import faiss

        self.faiss = faiss
        if path.exists():
            self.index = faiss.read_index(str(path))
        else:
            faiss.omp_set_num_threads(os.cpu_count())
            self.index = faiss.index_factory(items.shape[1], f"IVF{lists_of(items)},{self.codes(items.shape[1])}", faiss.METRIC_INNER_PRODUCT)
            self.index.train(items)
            self.index.add(items)
            faiss.write_index(self.index, str(path))
        faiss.omp_set_num_threads(1)


class FaissSq8(Faiss):
    """IVF-SQ8."""

    def codes(self, _):
        return "SQ8"

    def settings(self, _):
        return [(probes,) for probes in PROBES]

    def search(self, query, k, setting):
        return self.index.search(query[None], k, params=self.faiss.IVFSearchParameters(nprobe=setting[0]))[1][0]


class FaissPq(Faiss):
    """An IVF-PQ index of Faiss with fast scan."""

    def codes(self, width):
        return f"PQ{width // 2 if width % 2 == 0 else width}x4fsr,RFlat"

    def settings(self, k):
        return [(p, f) for p in PROBES if p >= 16 for f in ((2, 3, 4, 6, 8, 16) if k < 1000 else (1.5, 2, 3, 4))]

    def search(self, query, k, setting):
        lists = self.faiss.IVFSearchParameters(nprobe=setting[0])
        of = self.faiss.IndexRefineSearchParameters(k_factor=setting[1], base_index_params=lists)
        return self.index.search(query[None], k, params=of)[1][0]


class Scann:
    """Trees of anisotropic product codes; candidates are rescored with f32 rows."""

    settings = FaissPq.settings

    def __init__(self, items, path):
        import scann

        if path.exists():
            self.index = scann.scann_ops_pybind.load_searcher(str(path))
            return
        builder = scann.scann_ops_pybind.builder(items, 10, "dot_product")
        builder = builder.tree(lists_of(items), 64, training_sample_size=len(items), spherical=True)
        builder = builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100)
        self.index = builder.set_n_training_threads(os.cpu_count()).build()
        path.mkdir(parents=True)
        self.index.serialize(str(path))

    def search(self, query, k, setting):
        return self.index.search(query, final_num_neighbors=k, pre_reorder_num_neighbors=int(k * setting[1]), leaves_to_search=setting[0])[0]


class Hnswlib:
    """An HNSW graph over f32 rows."""

    def __init__(self, items, path):
        import hnswlib

        self.index = hnswlib.Index("ip", items.shape[1])
        if path.exists():
            self.index.load_index(str(path))
        else:
            self.index.init_index(len(items), ef_construction=200, M=24)
            self.index.add_items(items, num_threads=os.cpu_count())
            self.index.save_index(str(path))
        self.index.set_num_threads(1)

    def settings(self, k):
        return [(int(k * factor),) for factor in (1, 1.5, 2, 3, 4, 6, 10, 20, 40)]

    def search(self, query, k, setting):
        self.index.set_ef(setting[0])
        return self.index.knn_query(query, k)[0][0]


class Svs:
    """A Vamana graph over f32 rows, because its compressed rows do not support every processor."""

    settings = Hnswlib.settings

    def __init__(self, items, path):
        import svs

        parts = [str(path / name) for name in ("config", "graph", "data")]
        if path.exists():
            rows = svs.VectorDataLoader(parts[2], svs.DataType.float32)
            self.index = svs.Vamana(parts[0], svs.GraphLoader(parts[1]), rows, svs.DistanceType.MIP, num_threads=1)
        else:
            of = svs.VamanaBuildParameters(graph_max_degree=64, window_size=128, alpha=0.95)
            self.index = svs.Vamana.build(of, items, svs.DistanceType.MIP, num_threads=os.cpu_count())
            path.mkdir(parents=True)
            self.index.save(*parts)
        self.index.num_threads = 1

    def search(self, query, k, setting):
        self.index.search_window_size = setting[0]
        return self.index.search(query[None], k)[0][0]


PEERS = {"faiss-sq8": FaissSq8, "faiss-pq": FaissPq, "scann": Scann, "hnswlib": Hnswlib, "svs": Svs}


def searched(peer, ks, queries, truth):
    rows = []
    for k in ks:
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


def tell(sides, ks):
    print("| K | recall | side | µs | recall found | setting | KB read |\n|---|---|---|---|---|---|---|")
    for k in ks:
        for target in TARGETS:
            for name, rows in sides.items():
                by_name = [row for row in rows if row["k"] == k and row["target"] == target]
                fixed = [row for row in rows if row["k"] == k and not row["target"] and row["recall"] >= target]
                for row in sorted(fixed, key=lambda row: -row["qps"])[:1] + by_name:
                    read = f"{row['bytes'] / 1e3:.0f}" if row["bytes"] else ""
                    print(f"| {k} | {target} | {name} | {1e6 / row['qps']:.1f} | {row['recall']:.4f} | {row['setting']} | {read} |")


def write(sides, path):
    with open(path, "w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(["side", "k", "setting", "target", "recall", "qps", "bytes"])
        for name, rows in sides.items():
            for row in rows:
                lines.writerow([name, row["k"], row["setting"], row["target"] or "", f"{row['recall']:.4f}", f"{row['qps']:.1f}", row["bytes"] or ""])


COLOURS = ["#0b6e4f", "#1f77b4", "#7b3fa0", "#d62728", "#ff7f0e", "#8c564b", "#555555", "#bcbd22"]
WIDTH, HEIGHT, MARGIN = 300, 300, 50
LOWEST = 0.8  # recall at the left edge


def draw(sides, ks, title, path):
    """Draws a panel for each number of results: queries per second, on a logarithmic scale, against recall."""
    width, height = len(ks) * (WIDTH + MARGIN) + MARGIN, HEIGHT + 2 * MARGIN + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">']
    parts += [f'<rect width="{width}" height="{height}" fill="white"/>', f'<text x="{MARGIN}" y="16" font-size="13">{title}: queries a second against recall</text>']
    for n, k in enumerate(ks):
        fronts = {name: front([row for row in rows if row["k"] == k and not row["target"]]) for name, rows in sides.items()}
        parts += panel(fronts, MARGIN + n * (WIDTH + MARGIN), k)
    for n, name in enumerate(sides):
        x, y = MARGIN + n * 100, height - 12
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{COLOURS[n % len(COLOURS)]}"/><text x="{x + 14}" y="{y}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def front(rows):
    """Returns the Pareto-optimal settings, by ascending recall."""
    best = []
    for row in sorted(rows, key=lambda row: (-row["recall"], -row["qps"])):
        if row["recall"] >= LOWEST and (not best or row["qps"] > best[-1][1]):
            best.append((row["recall"], row["qps"]))
    return best[::-1]


def panel(fronts, left, k):
    rates = [math.log10(qps) for points in fronts.values() for _, qps in points] or [0, 1]
    low, high = math.floor(min(rates) * 4) / 4, math.ceil(max(rates) * 4) / 4 + 1e-9
    top = MARGIN
    x = lambda recall: left + (recall - LOWEST) / (1 - LOWEST) * WIDTH
    y = lambda rate: top + (high - rate) / (high - low) * HEIGHT
    parts = [f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>', f'<text x="{left + WIDTH / 2 - 20}" y="{top - 6}">K = {k}</text>']
    for recall in (0.8, 0.85, 0.9, 0.95, 1.0):
        parts.append(f'<line x1="{x(recall):.1f}" x2="{x(recall):.1f}" y1="{top}" y2="{top + HEIGHT}" stroke="#ddd"/><text x="{x(recall) - 10:.1f}" y="{top + HEIGHT + 14}">{recall}</text>')
    for rate in (base * 10**power for power in range(8) for base in (1, 2, 5)):
        if low <= math.log10(rate) <= high:
            parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y(math.log10(rate)):.1f}" y2="{y(math.log10(rate)):.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 4}" y="{y(math.log10(rate)) + 4:.1f}" text-anchor="end">{rate:,}</text>')
    for n, points in enumerate(fronts.values()):
        places = " ".join(f"{x(recall):.1f},{y(math.log10(qps)):.1f}" for recall, qps in points)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{COLOURS[n % len(COLOURS)]}" stroke-width="2"/>')
    return parts


if __name__ == "__main__":
    main()
