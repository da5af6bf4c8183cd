"""Writes golden files for managed ids: the ids that TorchRec's managed collisions hold after each eviction.

Writes tests/golden/train/managed.json: cases, each an eviction policy with a digest of the sorted ids after each of 1,000 evictions. The
stream is made of hashes on both sides, so that the file holds digests only. To recreate it on a CPU, install TorchRec as
`make_train_golden.py` says, then

    python python/make_managed_golden.py

TorchRec keeps one row for all other ids: `zch_size` is one more than the ids that are held, and the table's `unseen` is that row. An
unsharded module does not reset evicted rows (`evict` of `ManagedCollisionCollection` is not called), so only ids are compared.
"""

import json
from pathlib import Path

import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "train" / "managed.json"
ROWS, EVERY, BATCH, EVICTIONS = 64, 2, 24, 1000
MASK = 2**64 - 1
CASES = [
    ("lfu", 1.0, LFU_EvictionPolicy()),
    ("lru", 1.0, LRU_EvictionPolicy(1.0)),
    ("lru", 2.0, LRU_EvictionPolicy(2.0)),
    ("distance_lfu", 1.0, DistanceLFU_EvictionPolicy(1.0)),
    ("distance_lfu", 0.5, DistanceLFU_EvictionPolicy(0.5)),
]


def mix(state):
    """SplitMix64 of a state, as `sterling_core::random::splitmix64`."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(z):
    return z - 2**64 if z >= 2**63 else z


def occurrence(step, n):
    """Id number n of a step: few ids are frequent, and all of them drift."""
    draw = mix(mix(step) ^ n) >> 40
    # Shares fall with the square of the number; integers only, so that both sides agree.
    number = draw * draw // 2**24 * 600 // 2**24
    return signed(mix(number + step // 8))


def digest(ids):
    state = 0
    for id in sorted(ids):
        state = mix(state ^ (id & MASK))
    return f"{state >> 32:08x}"


def held(policy):
    module = MCHManagedCollisionModule(zch_size=ROWS, device=torch.device("cpu"), eviction_policy=policy, eviction_interval=EVERY)
    module.train()
    digests = []
    for step in range(1, EVERY * EVICTIONS + 1):
        values = torch.tensor([occurrence(step, n) for n in range(BATCH)])
        module({"f": JaggedTensor(values=values, lengths=torch.tensor([BATCH]))})
        if step % EVERY == 0:
            ids = module._mch_sorted_raw_ids
            digests.append(digest(ids[ids != torch.iinfo(torch.int64).max].tolist()))
    return "".join(digests)


def main():
    cases = [{"evict": evict, "exponent": exponent, "held": held(policy)} for evict, exponent, policy in CASES]
    OUT.write_text(json.dumps({"rows": ROWS, "every": EVERY, "batch": BATCH, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
