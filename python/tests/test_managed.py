"""Managed ids of tables: conversion of TorchRec's buffers, and rejected ids. Skipped without PyTorch."""

import tomllib

import numpy as np
import pytest
from sterling import ExportError, Table, export
from sterling.tables import _each, collect

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
from torch import nn  # noqa: E402


class User(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, f):
        return self.layer(f)


def test_managed_collisions_of_torchrec_become_managed_ids(tmp_path):
    torchrec = pytest.importorskip("torchrec")
    from torchrec.modules import mc_embedding_modules, mc_modules

    config = [torchrec.EmbeddingBagConfig(name="t", embedding_dim=6, num_embeddings=8, feature_names=["f"])]
    policy = mc_modules.DistanceLFU_EvictionPolicy()
    ids = mc_modules.MCHManagedCollisionModule(zch_size=8, device=torch.device("cpu"), eviction_policy=policy, eviction_interval=2)
    made = mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
        torchrec.EmbeddingBagCollection(tables=config), mc_modules.ManagedCollisionCollection({"t": ids}, config)
    )
    made.train()
    for step in range(20):
        seen = [10**12 + (step * n) % 13 for n in range(6)]
        made(torchrec.KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=torch.tensor(seen), lengths=torch.tensor([6])))
    made.eval()
    user, asked = User(), [10**12, 10**12 + 3, 10**12 + 12, 5, -1]
    given = torchrec.KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=torch.tensor(asked), lengths=torch.tensor([5]))
    with torch.no_grad():
        wanted = user(made(given)[0]["f"])
    package = export(tmp_path / "shop", user=user, tables=made, samples=[{"f": asked}])
    assert np.allclose(package.reference.queries([{"f": asked}]), wanted, atol=1e-6)
    assert tomllib.loads((package.path / "model.toml").read_text())["tables"] == [
        {"name": "t", "file": "tables.safetensors", "unseen": "row:7", "managed": True}
    ]
    ids._input_hash_func = lambda values, size: values
    with pytest.raises(ExportError, match="hashes ids"):
        collect(made)


class Zch:
    """The buffers of TorchRec's modules, in a collection of one table."""

    def __init__(self, rows, **buffers):
        module = type("Module", (), {"_input_hash_func": None, "_output_global_offset": 0} | buffers)()
        self._managed_collision_collection = type("Collection", (), {"_managed_collision_modules": {"t": module}})()
        config = type("Config", (), {"name": "t", "feature_names": ["f"]})()
        bags = {"embedding_bag_configs": lambda _: [config], "embedding_bags": {"t": nn.EmbeddingBag(rows, 6, mode="sum")}}
        self._embedding_module = type("Bags", (), bags)()


def test_buffers_of_managed_collisions_become_ids_of_rows():
    free, largest = -(2**63), 2**63 - 1
    sorted_ids = torch.tensor([-5, 7, 10**18, largest, largest])
    made = managed_tables(Zch(5, _mch_sorted_raw_ids=sorted_ids, _mch_remapped_ids_mapping=torch.tensor([3, 0, 2, 1, 4])))
    assert made["t"].ids.tolist() == [7, free, 10**18, -5, free] and made["t"].unseen == "row:4"
    made = managed_tables(Zch(3, _hash_zch_identities=torch.tensor([[9], [-1], [10**18]])))
    assert made["t"].ids.tolist() == [9, free, 10**18] and made["t"].unseen == "zero"
    with pytest.raises(ExportError, match="expected MCHManagedCollisionModule"):
        managed_tables(Zch(3))
    with pytest.raises(ExportError, match="3 rows, and Module has 2"):
        managed_tables(Zch(3, _hash_zch_identities=torch.tensor([[9], [-1]])))


def managed_tables(collection):
    return dict(_each(collection))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ids": [1, 2]}, r"ids are torch.int64 \[2\], expected torch.int64 \[3\]"),
        ({"ids": [1, 2, 1]}, "an id has two rows"),
        ({"ids": [1, 2, 3], "vocabulary": ["a"]}, "vocabulary and ids"),
        ({"ids": [1, 2, 3], "unseen": "row:1"}, "row 1 is reserved for unseen ids, expected no id, got 2"),
    ],
)
def test_ids_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ExportError, match=said):
        collect({"t": Table(torch.zeros(3, 2), **options)})
