"""Golden files of the sparse layer, made by the libraries whose semantics it implements.

Writes tests/golden/sparse/*.json from TorchRec (jagged types, collections) and FBGEMM (row formats, table-batched operator). The
tests read only the files. To regenerate them, on a CPU:

    pip install torch==2.14.0 fbgemm-gpu-cpu==1.9.0 numpy && pip install --no-deps torchrec==1.9.2
    pip install --no-deps tensordict torchmetrics==1.0.3 && pip install iopath tqdm pyre-extensions
    python python/make_sparse_golden.py

FBGEMM is bound to one version of torch: 1.9 needs 2.14 and fails to import with another.
"""

import json
from pathlib import Path

import torch
import fbgemm_gpu  # noqa: F401  (registers the operators)
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "sparse"


def floats(tensor):
    """Returns the f32 numbers as hexadecimal digits of their little-endian bytes: exact, and half the size of decimals."""
    return tensor.detach().float().contiguous().numpy().astype("<f4").tobytes().hex()


def jagged(kjt):
    weights = kjt.weights_or_none()
    return {
        "keys": kjt.keys(),
        "stride": kjt.stride(),
        "values": kjt.values().tolist(),
        "lengths": kjt.lengths().tolist(),
        "offsets": kjt.offsets().tolist(),
        "weights": None if weights is None else floats(weights),
        "length_per_key": kjt.length_per_key(),
    }


def random_kjt(generator, keys, stride, most, rows, weighted):
    lengths = torch.randint(0, most + 1, (len(keys) * stride,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor.from_lengths_sync(
        keys=keys,
        values=torch.randint(0, rows, (count,), generator=generator),
        lengths=lengths,
        weights=torch.rand(count, generator=generator) * 2 - 0.5 if weighted else None,
    )


def make_kjt():
    generator = torch.Generator().manual_seed(1)
    cases = []
    inputs = {
        "ragged": random_kjt(generator, ["a", "b", "c"], 4, 5, 1000, False),
        "weighted": random_kjt(generator, ["x", "y", "z"], 3, 4, 2**62, True),
        "empty bags": KeyedJaggedTensor.from_lengths_sync(
            keys=["p", "q"], values=torch.tensor([-5, 2**63 - 1]), lengths=torch.tensor([0, 0, 2, 0])
        ),
        "no values": KeyedJaggedTensor.from_lengths_sync(
            keys=["p", "q"], values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64)
        ),
        "one key": random_kjt(generator, ["only"], 5, 3, 50, True),
    }
    for name, kjt in inputs.items():
        order = list(range(len(kjt.keys())))[::-1]
        sizes = [1, len(kjt.keys()) - 1]
        other = KeyedJaggedTensor(
            keys=[k + "2" for k in kjt.keys()], values=kjt.values(), lengths=kjt.lengths(), weights=kjt.weights_or_none()
        )
        padded = {
            key: {
                "rows": [run.tolist() for run in part.to_dense()],
                "padded": part.to_padded_dense(desired_length=3, padding_value=-1).tolist(),
            }
            for key, part in kjt.to_dict().items()
        }
        cases.append(
            {
                "name": name,
                "input": jagged(kjt),
                "order": order,
                "permuted": jagged(kjt.permute(order)),
                "sizes": sizes,
                "split": [jagged(part) for part in kjt.split(sizes)],
                "concat": jagged(KeyedJaggedTensor.concat([kjt, other])),
                "jagged": padded,
            }
        )
    return cases


def make_collections():
    torch.manual_seed(2)
    generator = torch.Generator().manual_seed(2)
    tables = [
        ("articles", 40, 12, ["seen", "liked"], PoolingType.SUM),
        ("tags", 10, 12, ["tags"], PoolingType.MEAN),
        ("wide", 25, 36, ["liked"], PoolingType.SUM),
    ]
    weights = {name: torch.randn(rows, width, generator=generator) for name, rows, width, _, _ in tables}
    cases = []
    for weighted in (False, True):
        # TorchRec's float collection rejects weighted means: its tables are summed in that case.
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=width,
                feature_names=features,
                pooling=PoolingType.SUM if weighted else pooling,
            )
            for name, rows, width, features, pooling in tables
        ]
        bags = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
        for name in weights:
            bags.embedding_bags[name].weight.data.copy_(weights[name])
        kjt = random_kjt(generator, ["tags", "seen", "liked"], 6, 7, 10, weighted)
        pooled = bags(kjt)
        cases.append(
            {
                "weighted": weighted,
                "bags": [
                    {"feature": f, "table": c.name, "pooling": c.pooling.name.lower()} for c in configs for f in c.feature_names
                ],
                "input": jagged(kjt),
                "keys": pooled.keys(),
                "length_per_key": pooled.length_per_key(),
                "values": floats(pooled.values()),
            }
        )
    sequence = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=w, feature_names=f)
            for n, r, w, f, _ in tables
            if n in ("articles", "tags")
        ]
    )
    for name in ("articles", "tags"):
        sequence.embeddings[name].weight.data.copy_(weights[name])
    kjt = random_kjt(generator, ["tags", "seen", "liked"], 4, 5, 10, False)
    rows = {key: {"lengths": part.lengths().tolist(), "values": floats(part.values())} for key, part in sequence(kjt).items()}
    left = KeyedTensor(keys=["a", "b"], length_per_key=[2, 3], values=torch.arange(10.0).reshape(2, 5))
    right = KeyedTensor(keys=["c"], length_per_key=[1], values=torch.tensor([[50.0], [60.0]]))
    groups = [["c", "a"], ["b"]]
    return {
        "tables": {n: {"rows": r, "width": w, "values": floats(weights[n])} for n, r, w, _, _ in tables},
        "pooled": cases,
        "sequence": {"input": jagged(kjt), "features": rows},
        "regroup": {"groups": groups, "values": [floats(t) for t in KeyedTensor.regroup([left, right], groups)]},
    }


def edge_rows(width, generator):
    rows = [
        torch.randn(width, generator=generator),
        torch.randn(width, generator=generator) * 1e-3,
        torch.randn(width, generator=generator) * 1e3,
        torch.rand(width, generator=generator) * 60000 - 30000,
        torch.zeros(width),
        torch.full((width,), 0.3),
        torch.full((width,), -7.25),
        torch.randn(width, generator=generator) * 1e-7,
        torch.randn(width, generator=generator) * 1e-30,
        torch.linspace(-3, 4, width),
        torch.linspace(0, 255, width).floor(),
        torch.cat([torch.full((width - 1,), 1.0), torch.tensor([1.0 + 2**-12])]),
    ]
    return torch.stack(rows)


def make_formats():
    generator = torch.Generator().manual_seed(3)
    cases = []
    for width in (8, 64, 104):
        values = torch.cat([edge_rows(width, generator), torch.randn(2, width, generator=generator)])
        case = {"width": width, "rows": values.shape[0], "values": floats(values), "formats": {}}
        for sparse_type in (SparseType.FP32, SparseType.FP16, SparseType.INT8, SparseType.INT4, SparseType.INT2):
            name = {"FP32": "f32", "FP16": "f16"}.get(sparse_type.name, sparse_type.name.lower())
            case["formats"][name] = table_batched(sparse_type, width, values, generator)
        case["formats"]["bf16"] = plain_bf16(width, values)
        cases.append(case)
    return cases


def plain_bf16(width, values):
    """FBGEMM's operator has no bfloat16 rows on the CPU: PyTorch rounds them, and sums them in f32."""
    generator = torch.Generator().manual_seed(width)
    packed = values.bfloat16()
    found = {
        "row_bytes": 2 * width,
        "hex": bytes(packed.contiguous().view(torch.uint8).flatten().tolist()).hex(),
        "outputs": [],
    }
    for pooling, weighted in (("sum", False), ("sum", True), ("mean", False), ("none", False)):
        lengths = torch.randint(0, 6, (3,), generator=generator)
        ids = torch.randint(0, len(values), (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator) if weighted else None
        if pooling == "none":
            out = torch.nn.functional.embedding(ids, packed.float())
        else:
            offsets = lengths.cumsum(0) - lengths
            out = torch.nn.functional.embedding_bag(
                ids, packed.float(), offsets, mode=pooling, per_sample_weights=weights
            )
        found["outputs"].append(
            {
                "pooling": pooling,
                "ids": ids.tolist(),
                "lengths": lengths.tolist(),
                "weights": None if weights is None else floats(weights),
                "values": floats(out),
            }
        )
    return found


def table_batched(sparse_type, width, values, generator):
    """Returns rows as FBGEMM's operator stores them, the output of its rowwise quantizer, and pooled outputs."""
    rows = values.shape[0]
    found = {"outputs": []}
    if sparse_type in (SparseType.INT8, SparseType.INT4, SparseType.INT2):
        fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(values, sparse_type.bit_rate())
        packed = torch.cat([fused[:, -4:], fused[:, :-4]], dim=1)
    elif sparse_type == SparseType.FP16:
        packed = values.half().contiguous().view(torch.uint8)
    else:
        packed = values.contiguous().view(torch.uint8)
    found["row_bytes"] = packed.shape[1]
    found["hex"] = bytes(packed.flatten().tolist()).hex()
    for pooling in (PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE):
        for weighted in (False, True):
            if weighted and pooling == PoolingMode.NONE:
                continue
            operator = IntNBitTableBatchedEmbeddingBagsCodegen(
                [("t", rows, width, sparse_type, EmbeddingLocation.HOST)],
                device="cpu",
                pooling_mode=pooling,
                output_dtype=SparseType.FP32,
                row_alignment=1,
            )
            operator.initialize_weights()
            stored = operator.split_embedding_weights(split_scale_shifts=False)[0][0]
            assert stored.shape == packed.shape, (stored.shape, packed.shape)
            stored.copy_(packed)
            lengths = torch.randint(0, 6, (3,), generator=generator)
            ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
            weights = torch.rand(len(ids), generator=generator) if weighted else None
            out = operator(ids, offsets, weights)
            found["outputs"].append(
                {
                    "pooling": pooling.name.lower(),
                    "ids": ids.tolist(),
                    "lengths": lengths.tolist(),
                    "weights": None if weights is None else floats(weights),
                    "values": floats(out),
                }
            )
    return found


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for name, made in (("jagged", make_kjt()), ("collections", make_collections()), ("formats", make_formats())):
        path = OUT / f"{name}.json"
        path.write_text(json.dumps(made, separators=(",", ":")) + "\n")
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
