#!/usr/bin/env python3
"""Requested recall compared with measured recall, and its cost: the table of docs/benchmarks/recall.md.

    python scripts/bench_recall.py --sterling target/release/sterling --items 100000 --items 1000000 [--peer OLD/sterling]

For each number of items the script makes a catalogue (clusters of unequal size, unit vectors), queries for calibration, other queries for
the measurement, and filters that pass 50, 10, 1 and 0.1 %: independent of the embedding (`any`), or items of a region that is close
to the queries (`near`) or opposite to them (`far`). Then `sterling ann-bench` builds and calibrates an index, requests a recall,
and finds the smallest fixed number of lists that reaches this recall too. `--peer` is an older binary, whose default was an eighth of the
lists. Needs numpy. Data is stored in --folder and reused. With `--vectors FILE.npy` the catalogue is these vectors
(scripts/real_vectors.py), normalized, without those that are sampled as queries.
"""
import argparse, json, os, pathlib, shutil, subprocess, sys
import numpy as np

RATES = {"50": 2, "10": 10, "1": 100, "01": 1000}
DEEPEST = 1000  # exact answers of a filtered query
CALIBRATE = 256
PART = 250_000  # items whose scores are in memory at once


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sterling", default="target/release/sterling", help="the binary")
    options.add_argument("--peer", help="an older binary that is measured beside it")
    options.add_argument("--items", type=int, action="append", help="items of a catalogue; may be given several times")
    options.add_argument("--vectors", type=pathlib.Path, help="real vectors in place of clusters")
    options.add_argument("--width", type=int, default=64, help="width of the vectors")
    options.add_argument("--queries", type=int, default=200, help="queries that are measured")
    options.add_argument("--k", default="10,100,1000", help="results of unfiltered queries; filtered ones ask for 100")
    options.add_argument("--recall", type=float, default=0.98)
    options.add_argument("--rescore", default="f16")
    options.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("bench-recall"))
    options.add_argument("--no-filters", action="store_true", help="only unfiltered queries")
    options.add_argument("--remove", action="store_true", help="remove the data of a catalogue when it is measured")
    given = options.parse_args()
    for items in given.items or [100_000]:
        name = given.vectors.stem if given.vectors else f"{items}x{given.width}"
        folder = given.folder / name
        if not (folder / "whole").exists():
            source = real(given.vectors, given.queries) if given.vectors else clusters(items, given.width)
            make(folder, *source, given.queries, not given.no_filters)
        if given.vectors:
            items, given.width = np.load(folder / "items.npy", mmap_mode="r").shape
        lines = run(given, folder, items)
        tell(name, items, given, lines)
        if given.remove:
            shutil.rmtree(folder)


def clusters(items, width):
    """Returns vectors in clusters of unequal size, a function that samples queries for them, and the weight of each dimension."""
    rng = np.random.default_rng(7)
    count = max(1, min(2000, items // 100))
    centres = rng.standard_normal((count, width)).astype("f4")
    weights = rng.dirichlet(np.full(count, 0.5))
    spectrum = (np.arange(1, width + 1) ** -0.35).astype("f4")

    def draw(count, spread):
        rows = np.empty((count, width), "f4")
        for start in range(0, count, PART):
            part = rows[start : start + PART]
            part[:] = centres[rng.choice(len(centres), len(part), p=weights)]
            part += spread * rng.standard_normal(part.shape, dtype="f4")
            part *= spectrum
            part /= np.linalg.norm(part, axis=1, keepdims=True)
        return rows

    return draw(items, 0.9), lambda count: draw(count, 1.1), spectrum, rng


def real(path, queries):
    """Returns what `clusters` returns, for the vectors of a file: queries are vectors that are not items."""
    rng = np.random.default_rng(7)
    rows = np.load(path).astype("f4")
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-20)
    rows = rows[rng.permutation(len(rows))]
    ends = np.cumsum([CALIBRATE, queries, queries * 12])
    drawn = iter(np.split(rows[: ends[-1]], ends[:-1]))
    return rows[ends[-1] :], lambda count: next(drawn), rows.std(0), rng


def make(folder, rows, draw, spectrum, rng, queries, with_filters):
    """Writes a catalogue, its attributes, the queries and the exact answers."""
    items, width = rows.shape
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("anywhere", "edge"):
        (folder / part).mkdir(parents=True)
    np.save(folder / "items.npy", rows)
    np.save(folder / "calibrate.npy", draw(CALIBRATE))
    asked, pool = draw(queries), draw(queries * 12)
    direction = rng.standard_normal(width).astype("f4") * spectrum
    direction /= np.linalg.norm(direction)
    np.save(folder / "anywhere/queries.npy", asked)
    answers(folder / "anywhere/truth.npy", rows, asked, None, 10_000)
    if with_filters:
        edge = pool[np.argsort(-(pool @ direction))[:queries]]
        np.save(folder / "edge/queries.npy", edge)
        rank = np.empty(items, "i8")
        rank[np.argsort(rows @ direction)] = np.arange(items)
        columns = [rng.integers(0, n, items) for n in RATES.values()] + [rank * n // items for n in RATES.values()]
        attributes = np.stack(columns, 1).astype("i2")
        np.save(folder / "attributes.npy", attributes)
        answers(folder / "edge/truth.npy", rows, edge, None, 100)
        filters = {"anywhere": {}, "edge": {}}
        for n, (rate, values) in enumerate(RATES.items()):
            filters["anywhere"][f"any{rate}"] = (n, values // 2)
            filters["edge"][f"near{rate}"] = (n + 4, values - 1)
            filters["edge"][f"far{rate}"] = (n + 4, 0)
        for part, vectors in (("anywhere", asked), ("edge", edge)):
            for name, (column, value) in filters[part].items():
                passing = np.flatnonzero(attributes[:, column] == value)
                answers(folder / part / f"truth_{name}.npy", rows, vectors, passing, DEEPEST)
            told = {name: {"expression": f"f{column}:{value}"} for name, (column, value) in filters[part].items()}
            (folder / part / "filters.json").write_text(json.dumps(told))
    (folder / "whole").touch()


def answers(path, rows, vectors, passing, most):
    """Returns the best `most` of the passing rows for each vector, best first."""
    count = len(rows) if passing is None else len(passing)
    most = min(most, count)
    best = [(np.empty(0, "f4"), np.empty(0, "i4")) for _ in vectors]
    for start in range(0, count, PART):
        which = np.arange(start, min(start + PART, count)) if passing is None else passing[start : start + PART]
        found = vectors @ rows[which[0] : which[-1] + 1].T if passing is None else vectors @ rows[which].T
        for n, (scores, numbers) in enumerate(best):
            # Rows that score below the worst of the current best rows are skipped.
            better = np.flatnonzero(found[n] > scores.min()) if len(scores) == most else np.arange(len(which))
            scores = np.concatenate([scores, found[n][better]])
            numbers = np.concatenate([numbers, which[better].astype("i4")])
            if len(scores) > most:
                kept = np.argpartition(-scores, most - 1)[:most]
                scores, numbers = scores[kept], numbers[kept]
            best[n] = scores, numbers
    np.save(path, np.stack([numbers[np.argsort(-scores, kind="stable")] for scores, numbers in best]))


def run(given, folder, items):
    """Returns the output lines of all measurements, each with its set of queries and binary."""
    lines = []
    for part in ("anywhere",) if given.no_filters else ("anywhere", "edge"):
        common = ["ann-bench", "--items", folder / "items.npy", "--rescore", given.rescore, "--queries-count", given.queries]
        common += ["--queries", folder / part / "queries.npy", "--truth", folder / part / "truth.npy"]
        if not given.no_filters:
            common += ["--attributes", folder / "attributes.npy", "--filters", folder / part / "filters.json"]
        # Only unfiltered queries are measured with several numbers of results.
        k = given.k if part == "anywhere" else "100"
        calibrated = ["--recall", given.recall, "--calibrate-queries", folder / "calibrate.npy", "--cheapest"]
        eighth = max(1, round(4 * items**0.5) // 8)
        runs = [(given.sterling, ["--k", k, "--probes", eighth, *calibrated])]
        if given.peer:
            runs.append((given.peer, ["--k", k, "--probes", eighth]))
        for binary, more in runs:
            command = [str(word) for word in (binary, *common, *more)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ)
            if done.returncode:
                sys.exit(f"{' '.join(command)}: status {done.returncode}")
            lines += [{"part": part, "binary": binary, **json.loads(line)} for line in done.stdout.splitlines()]
    return lines


def tell(name, items, given, lines):
    """Prints the table of one catalogue."""
    for line in lines:
        if "build_s" in line:
            print(f"{items:,} x {given.width}, {line['binary']}: {line['lists']} lists, built in {line['build_s']} s", end="")
            print(f", {line['bytes_per_item']} bytes an item")
        if "calibrate_s" in line:
            print(f"calibrated in {line['calibrate_s']} s with {line['queries']} queries")
    (given.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("| filter | K | recall | worst | lists | items scanned | ms | fewest lists: lists | recall | worst | ms | cost | eighth: ms | recall | faster |")
    print("|" + "---|" * 15)
    measured = [line for line in lines if "qps" in line]
    for key in dict.fromkeys((line["part"], line["filter"], line["k"]) for line in measured):
        of_key = [line for line in measured if (line["part"], line["filter"], line["k"]) == key]
        asked = next((line for line in of_key if line.get("target")), None)
        fixed = next((line for line in of_key if line.get("cheapest") and not line.get("target")), None)
        old = [line for line in of_key if line["binary"] == (given.peer or given.sterling) and not line.get("cheapest")]
        old = next((line for line in old if not line.get("target")), None)
        ms = lambda line: line["p50_ms"]
        cells = [key[1] or "none", key[2], asked["recall"], asked["worst_recall"], f"{asked['lists_probed']:.0f}"]
        cells += [f"{asked['items_scanned']:,.0f}", f"{ms(asked):.3f}", f"{fixed['lists_probed']:.0f}", fixed["recall"]]
        cells += [fixed["worst_recall"], f"{ms(fixed):.3f}", f"{ms(asked) / ms(fixed):.2f}"]
        cells += [f"{ms(old):.3f}", old["recall"], f"{ms(old) / ms(asked):.1f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
