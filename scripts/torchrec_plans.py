#!/usr/bin/env python3
"""Writes the plans of TorchRec's planner for the tables of MLPerf's DLRM-DCNv2 to tests/golden/planner/dlrm_dcnv2.json.

    pip install torch==2.14.0 fbgemm-gpu-cpu==1.9.0 torchrec==1.9.2
    python scripts/torchrec_plans.py

Runs TorchRec's planner with its default proposers and kernels, for one and for two hosts with 8 GPUs of 80 GiB each. The planner
gets the constants of the topology in `crates/embedding/src/planner/tests.rs`, if TorchRec has such constants. The tests compare the
costs of these plans with Sterling's plans for the same machines, by Sterling's cost model.
"""

import json
import pathlib
import re

import torch
import torchrec
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

# MLPerf training v3.0, recommendation_v2/torchrec_dlrm: num_embeddings_per_feature and multi_hot_sizes.
ROWS = [40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14]
ROWS += [40000000, 40000000, 40000000, 590152, 12973, 108, 36]
IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
WIDTH = 128
GPUS = 8
# Number of requests that a host answers together; TorchRec expects the number per GPU.
BATCH = 512
GIB = 1 << 30
GB_PER_MS = 10**9 / 1000


def plan(hosts: int) -> dict:
    tables = [
        EmbeddingBagConfig(name=f"t_cat_{n}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[f"cat_{n}"])
        for n, rows in enumerate(ROWS)
    ]
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    topology = Topology(
        world_size=hosts * GPUS,
        local_world_size=GPUS,
        compute_device="cuda",
        hbm_cap=80 * GIB,
        ddr_cap=480 * GIB // GPUS,
        hbm_mem_bw=2000 * GB_PER_MS,
        ddr_mem_bw=150 * GB_PER_MS,
        hbm_to_ddr_mem_bw=25 * GB_PER_MS,
        inter_host_bw=50 * GB_PER_MS,
    )
    constraints = {f"t_cat_{n}": ParameterConstraints(pooling_factors=[float(ids)]) for n, ids in enumerate(IDS)}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=BATCH // GPUS,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    found = planner.plan(module, [EmbeddingBagCollectionSharder()])
    placed = {}
    for name, sharding in found.plan[""].items():
        shards = []
        for shard in sharding.sharding_spec.shards if sharding.sharding_spec else []:
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            rank = int(re.search(r"rank:(\d+)", str(shard.placement)).group(1))
            shards.append({"rank": rank, "rows": [row, row + rows], "columns": [column, column + columns]})
        placed[name] = {"sharding": sharding.sharding_type, "kernel": sharding.compute_kernel, "shards": shards}
    return placed


out = {
    "by": f"torchrec {torchrec.__version__}",
    "batch": BATCH,
    "width": WIDTH,
    "tables": [{"name": f"t_cat_{n}", "rows": rows, "ids": ids} for n, (rows, ids) in enumerate(zip(ROWS, IDS))],
    "plans": [{"hosts": hosts, "gpus": GPUS, "tables": plan(hosts)} for hosts in (1, 2)],
}
path = pathlib.Path(__file__).parent.parent / "tests/golden/planner/dlrm_dcnv2.json"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(out, indent=1) + "\n")
