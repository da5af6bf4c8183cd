"""Golden files of the import from Faiss: small index files, and the search results of Faiss.

Writes tests/golden/faiss/NAME.index and answers.json in the same folder. The tests read only the files. To regenerate them:

    pip install faiss-cpu==1.15.1 numpy==2.4.6
    python python/make_faiss_golden.py
"""

import json
from pathlib import Path

import faiss
import numpy as np

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "faiss"
D, LISTS, ITEMS, QUERIES = 24, 16, 1500, 20
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
SEARCHES = [(1, 10), (4, 50), (LISTS, 100)]
SAMPLED = range(0, ITEMS, 97)


def clustered(count, seed, centres):
    random = np.random.default_rng(seed)
    values = centres[random.integers(0, len(centres), count)] + 0.7 * random.standard_normal((count, D))
    return values.astype("<f4")


def unit(values):
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def digits(array):
    """Returns the f32 numbers as hexadecimal digits of their little-endian bytes."""
    return np.ascontiguousarray(array, "<f4").tobytes().hex()


def scalar(kind, metric, residual=False, coarse=None):
    coarse = coarse or (faiss.IndexFlatIP(D) if metric == IP else faiss.IndexFlatL2(D))
    return faiss.IndexIVFScalarQuantizer(coarse, D, LISTS, kind, metric, residual)


def write(name, index, queries, ids, searches=SEARCHES):
    """Writes the index and its answers. `ids` are those of a few vectors, which Faiss decodes."""
    faiss.write_index(index, str(OUT / f"{name}.index"))
    found = []
    ivf = faiss.extract_index_ivf(index)
    for probes, k in searches:
        ivf.nprobe = probes
        distances, labels = index.search(queries, k)
        assert (labels >= 0).all(), f"{name}: {probes} lists hold fewer than {k} items"
        found.append({"probes": probes, "k": k, "ids": labels.tolist(), "distances": digits(distances)})
    distances, lists = ivf.quantizer.search(queries, ivf.nlist)
    if ivf.direct_map.type == faiss.DirectMap.NoMap:
        ivf.make_direct_map()  # After the file is written: `reconstruct` needs it.
    return {
        "metric": "l2" if index.metric_type == L2 else "ip",
        "queries": digits(queries),
        "items": index.ntotal,
        "lists": lists.tolist(),
        "list_distances": digits(distances),
        "sampled": [int(i) for i in ids],
        "vectors": digits(np.stack([index.reconstruct(int(i)) for i in ids])),
        "searches": found,
    }


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    faiss.omp_set_num_threads(1)
    centres = np.random.default_rng(1).standard_normal((20, D))
    loose, queries = clustered(ITEMS, 2, centres), clustered(QUERIES, 3, centres)
    vectors, unit_queries = unit(loose), unit(queries)
    answers = {}

    def case(name, index, values, asked):
        index.train(values)
        index.add(values)
        answers[name] = write(name, index, asked, SAMPLED)

    # Vectors of unequal length, with inner products.
    case("flat_ip", faiss.IndexIVFFlat(faiss.IndexFlatIP(D), D, LISTS, IP), loose, queries)
    case("sq8_ip", scalar(faiss.ScalarQuantizer.QT_8bit, IP), loose, queries)
    case("sq8_residual_l2", scalar(faiss.ScalarQuantizer.QT_8bit, L2, residual=True), vectors, unit_queries)
    case("fp16_ip", scalar(faiss.ScalarQuantizer.QT_fp16, IP, residual=True), vectors, unit_queries)
    # Inner products over lists that were trained with L2.
    mixed = scalar(faiss.ScalarQuantizer.QT_8bit_uniform, IP, coarse=faiss.IndexFlatL2(D))
    case("uniform_mixed", mixed, vectors, unit_queries)
    # Ids from the user, with a hash table as direct map.
    inner = scalar(faiss.ScalarQuantizer.QT_8bit, IP)
    mapped = faiss.IndexIDMap2(inner)
    mapped.train(loose)
    ids = np.arange(ITEMS, dtype="<i8") * 7919 + (1 << 40)
    mapped.add_with_ids(loose, ids)
    answers["idmap2"] = write("idmap2", mapped, queries, ids[:: len(ids) // 20])
    # Most lists are empty: sizes are written as pairs. Integral bytes, ids by `add_with_ids`, a hash table as direct map.
    sparse = scalar(faiss.ScalarQuantizer.QT_8bit_direct, IP)
    bytes_ = np.random.default_rng(4).integers(0, 256, (400, D)).astype("<f4")
    sparse.train(bytes_)
    _, nearest = sparse.quantizer.search(bytes_, 1)
    few = np.flatnonzero(np.isin(nearest[:, 0], np.argsort(np.bincount(nearest[:, 0], minlength=LISTS))[-3:]))[:60]
    sparse.set_direct_map_type(faiss.DirectMap.Hashtable)
    sparse.add_with_ids(bytes_[few], few.astype("<i8"))
    answers["sparse_direct"] = write("sparse_direct", sparse, bytes_[:QUERIES], few[::10].tolist(), [(LISTS, 20)])
    with open(OUT / "answers.json", "w") as out:
        json.dump(answers, out, separators=(",", ":"))
        out.write("\n")


main()
