"""Modules to packages: the written files, their difference from PyTorch, and rejected modules. Skipped without PyTorch."""

import json
import pathlib
import random
import tomllib
import warnings

import numpy as np
import pytest
import sterling
from sterling import Category, Column, Dense, ExportError, Ids, ItemVector, Query, Table

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
import sterling.exporters  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

D = 8


class User(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6 + 4 + 3, D)

    def forward(self, installed, section, size):
        return F.normalize(self.layer(torch.cat([installed, section, size], -1)), dim=-1)


class Item(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(6 + 4, D), nn.Dropout(0.5)

    def forward(self, package, section):
        return F.normalize(self.drop(self.layer(torch.cat([package, section], -1))), dim=-1)


class Rank(nn.Module):
    def __init__(self, tasks=2):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3 * D + 1, 16), nn.LayerNorm(16), nn.Linear(16, tasks)

    def forward(self, query, item, popularity):
        user = query.unsqueeze(1).expand_as(item)
        x = torch.cat([user, item, user * item, popularity.unsqueeze(-1)], -1)
        return self.last(torch.relu(self.norm(self.first(x))))


def tables():
    torch.manual_seed(1)
    return {
        "packages": nn.EmbeddingBag(50, 6, mode="sum"),
        "sections": Table(nn.Embedding(3, 4), vocabulary=["admin", "games", "web"], unseen="row:0"),
    }


def features():
    return {
        "user": [Ids("installed", "packages"), Category("section", "sections", "mean"), Dense("size", 3)],
        "item": [Ids("package", "packages", column="id"), Category("section", "sections")],
    }


def items(count=40):
    draw = random.Random(1)
    return [{"id": n, "section": draw.choice(["admin", "games", "new"]), "popularity": draw.random()} for n in range(count)]


SAMPLES = [
    {"installed": [1, 2, 3], "section": ["web", "games", "unknown"], "size": [0.1, 0.2, 0.3]},
    {"installed": {"values": [4, 99], "weights": [0.5, 2.0]}},
    {},
]


def export(path, **changes):
    given = dict(
        user=User(), item=Item(), overarch=Rank(), tables=tables(), features=features(), tasks=["click", "buy"],
        value="click + w * buy", constants={"w": 2}, samples=SAMPLES, items=items(), program=False,
    )  # fmt: skip
    return sterling.export(path, **given | changes)


def refused(tmp_path, said, **changes):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ExportError, match=said):
        export(tmp_path / "shop", **changes)
    assert sorted(tmp_path.iterdir()) == before, "a rejected export leaves no files"


def test_a_package_is_served_as_pytorch_has_it(tmp_path, program):
    made = export(tmp_path / "shop", program=program)
    assert set(made.differences) == {"user.onnx", "item.onnx", "overarch.onnx", "served"}
    assert made.largest < 1e-4, str(made)
    spec = tomllib.loads((made.path / "model.toml").read_text())
    assert (spec["name"], spec["dimension"], spec["value"]["constants"]) == ("shop", D, {"w": 2.0})
    assert [feature["kind"] for feature in spec["user"]["features"]] == ["ids", "category", "dense"]
    assert (made.path / "sections.txt").read_text() == "admin\ngames\nweb\n"


def test_modules_stay_as_they_were(tmp_path):
    user = User().train()
    before = {name: tensor.clone() for name, tensor in user.state_dict().items()}
    export(tmp_path / "shop", user=user)
    assert user.training and all((before[name] == tensor).all() for name, tensor in user.state_dict().items())


def test_graphs_name_nothing_of_the_machine(tmp_path):
    made = export(tmp_path / "shop")
    for file in made.path.glob("*.onnx"):
        data = file.read_bytes()
        assert str(pathlib.Path(__file__).parent).encode() not in data and b"stack_trace" not in data and b".py" not in data


def test_the_same_modules_give_the_same_bytes(tmp_path):
    torch.manual_seed(2)
    user = User()
    one, other = (export(tmp_path / name, user=user, name="shop", overarch=None, tasks=[], value=None, constants=None) for name in "ab")
    for file in ("user.onnx", "tables.safetensors", "model.toml"):
        assert (one.path / file).read_bytes() == (other.path / file).read_bytes()


def test_positional_modules_take_the_features_in_their_order(tmp_path):
    class Positional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = User()

        def forward(self, *inputs):
            return self.inner(*inputs)

    assert export(tmp_path / "shop", user=Positional()).largest < 1e-4


def test_an_export_over_an_older_one_replaces_its_files(tmp_path):
    export(tmp_path / "shop")
    (tmp_path / "shop/README.md").write_text("kept")
    export(tmp_path / "shop", description="newer")
    assert "newer" in (tmp_path / "shop/model.toml").read_text()
    assert (tmp_path / "shop/README.md").read_text() == "kept"


def test_storage_of_tables(tmp_path):
    from safetensors.torch import load_file

    weight = torch.randn(5, 6)
    given = tables() | {"packages": Table(weight.numpy(), storage="f16")}
    made = export(tmp_path / "shop", tables=given)
    assert load_file(made.path / "tables.safetensors")["packages"].dtype == torch.float16
    assert made.reference.tables["packages"].weight.dtype == torch.float16
    refused(tmp_path, "table `packages`: a number is not finite in f16", tables=given | {"packages": Table(weight * 1e6, storage="f16")})


class Sequence(nn.Module):
    def __init__(self, length=5):
        super().__init__()
        self.layer, self.places = nn.Linear(6, 2 * D), nn.Parameter(torch.randn(length, 6))

    def forward(self, history, history_mask):
        encoded = (history + self.places) * history_mask.unsqueeze(-1)
        return {"encoded": encoded, "query": self.layer(encoded.sum(1)).reshape(-1, 2, D)}


class Wide(nn.Module):
    """Reads all inputs that an OverArch may read."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6 + 4 + 3 + D + 2, 1)

    def forward(self, query, encoded, history_mask, item, similarity, parts, image, item_section, popularity):
        attention = torch.softmax(parts @ encoded.transpose(1, 2) + (history_mask.unsqueeze(1) - 1) * 1e4, -1)
        numbers = torch.stack([similarity, popularity], -1)
        return self.layer(torch.cat([attention @ encoded, item_section, image, item * query.sum(1, keepdim=True), numbers], -1))


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.parts = nn.Linear(6, D), nn.Linear(6, 6)

    def forward(self, package):
        return {"item": self.item(package), "parts": self.parts(package)}


def wide(**changes):
    rows = [row | {"picture": [0.25 * n, -1.0, 0.5]} for n, row in enumerate(items())]
    return dict(
        user=Sequence(), item=Parts(), overarch=Wide(), tasks=["click"], value="click", constants=None, items=rows,
        queries=[Query("one"), Query("two", weight=0.5)], merge="union",
        item_vectors=[ItemVector("parts", 6), ItemVector("image", 3, column="picture", format="f32")],
        features={
            "user": [Ids("history", "packages", "none", length=5)],
            "item": [Ids("package", "packages", column="id")],
            "overarch": [Category("item_section", "sections", column="section")],
        },
        samples=[{"history": [1, 2, 3, 4, 5, 6, 7]}, {"history": [9]}, {}],
    ) | changes  # fmt: skip


def test_all_that_an_overarch_may_read(tmp_path):
    made = export(tmp_path / "wide", **wide())
    assert made.largest < 1e-4
    spec = tomllib.loads((made.path / "model.toml").read_text())
    assert [query["name"] for query in spec["user"]["queries"]] == ["one", "two"]
    assert spec["overarch"]["features"][0]["column"] == "section"
    assert [vector["name"] for vector in spec["item"]["vectors"]] == ["parts", "image"]
    user = made.reference._inputs("user", [{"history": [1, 2, 3, 4, 5, 6, 7]}, {"history": [9]}])
    assert user["history_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert (user["history"][0] == made.reference.tables["packages"].weight[3:8]).all()
    scores = made.reference.scores({"history": [9]}, wide()["items"])
    assert scores["click"].shape == (40,) and ((scores["click"] > 0) & (scores["click"] < 1)).all()


class Tagged(nn.Module):
    """Attention over the values of an item's column."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4 + D, 1)

    def forward(self, query, item, tags, tags_mask):
        asked = query[:, None, None, :4]
        weights = torch.softmax((tags * asked).sum(-1) + (tags_mask - 1) * 1e4, -1)
        interest = (weights.unsqueeze(-1) * tags).sum(2)
        return self.layer(torch.cat([interest, item * query.unsqueeze(1)], -1))


def test_values_of_a_column_in_turn(tmp_path, program):
    rows = [row | {"tags": ["web", "admin", "web"][: n % 4]} for n, row in enumerate(items())]
    of_items = {"overarch": [Category("tags", "sections", "none", length=2, keep="first")]}
    made = export(
        tmp_path / "shop", overarch=Tagged(), tasks=["click"], value="click", constants=None, items=rows, features=features() | of_items, program=program
    )
    assert made.largest < 1e-4, str(made)
    spec = tomllib.loads((made.path / "model.toml").read_text())
    assert spec["overarch"]["features"] == [
        {"name": "tags", "kind": "category", "table": "sections", "pooling": "none", "length": 2, "keep": "first"}
    ]
    given = made.reference._inputs("overarch", rows[:4])
    assert given["tags_mask"].tolist() == [[0, 0], [1, 0], [1, 1], [1, 1]]
    # Without duplicates, ascending, as a column stores them.
    assert (given["tags"][3] == made.reference.tables["sections"].weight[[0, 2]]).all()


def test_collections_of_torchrec_say_their_features(tmp_path):
    torchrec = pytest.importorskip("torchrec")
    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name="packages", embedding_dim=6, num_embeddings=50, feature_names=["installed", "package"]),
            torchrec.EmbeddingBagConfig(
                name="sections", embedding_dim=4, num_embeddings=3, feature_names=["section"], pooling=torchrec.PoolingType.MEAN
            ),
        ]
    )
    given = {"user": [Dense("size", 3)], "item": [Ids("package", "packages", column="id")]}
    samples = [{"installed": [1, 2, 3], "section": [0, 2, 2], "size": [0.1, 0.2, 0.3]}]
    rows = [row | {"section": n % 3} for n, row in enumerate(items())]
    made = export(tmp_path / "shop", tables=bags, features=given, samples=samples, items=rows)
    ids = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["installed", "section", "package"], values=torch.tensor([1, 2, 3, 0, 2, 2]), lengths=torch.tensor([3, 3, 0])
    )
    pooled, ours = bags(ids).to_dict(), made.reference._inputs("user", samples)
    assert torch.allclose(ours["installed"], pooled["installed"]) and torch.allclose(ours["section"], pooled["section"])


class Bags(nn.Module):
    def __init__(self, count=1):
        super().__init__()
        self.layer = nn.Linear(6 * count, D)

    def forward(self, *bags):
        return self.layer(torch.cat(bags, -1))


def bags(path, table, feature=None, samples=(), **changes):
    """Writes the package of a tower over one feature `f` of table `t`."""
    given = dict(user=Bags(), item=None, overarch=None, tasks=[], value=None, constants=None, samples=samples, items=None,
                 tables={"t": table}, features={"user": [feature or Ids("f", "t")]})  # fmt: skip
    return export(path, **given | changes)


@pytest.mark.parametrize("options", [{}, {"mode": "mean"}, {"mode": "sum"}, {"mode": "sum", "padding_idx": 2}, {"mode": "mean", "include_last_offset": True}])
def test_bags_pool_as_their_module(tmp_path, options):
    torch.manual_seed(3)
    table, user = nn.EmbeddingBag(50, 6, scale_grad_by_freq=True, **options), Bags()
    made = bags(tmp_path / "shop", table, user=user)
    spec = tomllib.loads((made.path / "model.toml").read_text())
    assert spec["user"]["features"][0]["pooling"] == table.mode
    histories = [[3, 5, 9], [], [2, 2, 7], [49]]
    offsets = [0, 3, 3, 6] + ([7] if table.include_last_offset else [])
    with torch.no_grad():
        wanted = user(table(torch.tensor(sum(histories, [])), torch.tensor(offsets)))
    assert np.allclose(made.reference.queries([{"f": history} for history in histories]), wanted, atol=1e-6)


def test_a_bag_is_served_as_its_module_pools(tmp_path, program):
    rows = [{"id": n, "embedding": [float(n * k % 7) for k in range(D)]} for n in range(20)]
    made = bags(tmp_path / "shop", nn.EmbeddingBag(50, 6), samples=[{"f": [3, 5, 9]}], items=rows, program=program)
    assert made.differences["served"] < 1e-4


def test_a_pooling_that_contradicts_the_bag_is_refused(tmp_path):
    for table, pooling in [(nn.EmbeddingBag(50, 6), "sum"), (nn.EmbeddingBag(50, 6, mode="sum"), "mean"), (Table(torch.ones(50, 6), pooling="mean"), "sum")]:
        with pytest.raises(ExportError, match=f"feature `f`: pooling `{pooling}`, but table `t` pools by"):
            bags(tmp_path / "shop", table, Ids("f", "t", pooling))
    with pytest.raises(ExportError, match="table `t`: pooling `sum` of an nn.EmbeddingBag with mode `mean`"):
        bags(tmp_path / "shop", Table(nn.EmbeddingBag(50, 6), pooling="sum"))
    with pytest.raises(ExportError, match="table `t`: nn.EmbeddingBag fails on ids|table `t`: EmbeddingBag fails on ids"):
        bags(tmp_path / "shop", nn.EmbeddingBag(50, 6)).reference.queries([{"f": {"values": [1], "weights": [2.0]}}])
    # A plain weight uses the pooling of the feature, and rows of a bag are rows.
    bags(tmp_path / "mean", nn.Embedding(50, 6), Ids("f", "t", "mean"))
    export(tmp_path / "wide", **wide(tables=tables() | {"packages": nn.EmbeddingBag(50, 6)}))
    assert {path.name for path in tmp_path.iterdir()} == {"shop", "mean", "wide"}


class Twice(nn.EmbeddingBag):
    def forward(self, *inputs, **named):
        return super().forward(*inputs, **named) * 2


def test_a_module_that_pools_in_its_own_way_is_refused(tmp_path):
    with pytest.raises(ExportError, match="table `t`: Twice differs by .* from the mean of rows of ids"):
        bags(tmp_path / "shop", Twice(50, 6))


def test_rows_of_padding_that_are_not_zero_are_told(tmp_path):
    weight = torch.ones(50, 6)
    with pytest.warns(UserWarning, match="table `t`: the row of padding_idx 0 is not zero"):
        bags(tmp_path / "shop", nn.Embedding.from_pretrained(weight, padding_idx=0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*padding_idx.*")
        bags(tmp_path / "shop", nn.Embedding(50, 6, padding_idx=0))


def collection(*tables, **options):
    torchrec = pytest.importorskip("torchrec")
    config = lambda name, names, **more: torchrec.EmbeddingBagConfig(  # noqa: E731
        name=name, embedding_dim=6, num_embeddings=50, feature_names=names, **more
    )
    return torchrec.EmbeddingBagCollection(tables=[config(*given) for given in tables], **options)


def of_torchrec(bags, feature, ids, weights):
    torchrec = pytest.importorskip("torchrec")
    batch = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=[feature], values=torch.tensor(ids), lengths=torch.tensor([len(ids)]), weights=torch.tensor(weights)
    )
    with torch.no_grad():
        return bags(batch).to_dict()[feature]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_weights_count_where_the_collection_is_weighted(tmp_path, program, is_weighted):
    sample = {"f": {"values": [1, 2], "weights": [10.0, 100.0]}}
    ebc, user = collection(("t", ["f"]), is_weighted=is_weighted), Bags()
    rows = [{"id": n, "embedding": [float(n * k % 7) for k in range(D)]} for n in range(20)]
    made = export(tmp_path / "shop", user=user, item=None, overarch=None, tasks=[], value=None, constants=None, tables=ebc,
                  features={"user": [Ids("f", "t")]}, samples=[sample], items=rows, program=program)  # fmt: skip
    with torch.no_grad():
        wanted = user(of_torchrec(ebc, "f", [1, 2], [10.0, 100.0]))
    assert np.allclose(made.reference.queries([sample]), wanted, atol=1e-5)
    assert made.differences["served"] < 1e-4
    spec = tomllib.loads((made.path / "model.toml").read_text())
    assert spec["user"]["features"][0].get("weights", True) == is_weighted


def test_collections_that_say_too_little_are_refused(tmp_path):
    torchrec = pytest.importorskip("torchrec")
    user = Bags(2)
    given = dict(user=user, item=None, overarch=None, tasks=[], value=None, constants=None, samples=(), items=None, features=None)
    mean = torchrec.EmbeddingBagCollection(tables=[torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=6, num_embeddings=50, feature_names=["f"], pooling=torchrec.PoolingType.MEAN)])  # fmt: skip
    made = export(tmp_path / "mean", **given | {"user": Bags(), "tables": mean, "features": {"user": [Ids("f", "t")]}})
    assert tomllib.loads((made.path / "model.toml").read_text())["user"]["features"][0]["pooling"] == "mean"
    with pytest.raises(ExportError, match="feature `f`: pooling `sum`, but table `t` pools by `mean`"):
        export(tmp_path / "shop", **given | {"tables": mean, "features": {"user": [Ids("f", "t", "sum")]}})

    class One(Bags):
        def forward(self, f):
            return self.layer(torch.cat([f, f], -1))

    both = collection(("t", ["f"]), ("u", ["f"]))
    with pytest.raises(ExportError, match=r'forward takes `f`, which the tables t and u both feed; .*Ids\("f_t", "t", column="f"\)'):
        export(tmp_path / "shop", **given | {"user": One(2), "tables": both})
    several = [Ids("f_t", "t", column="f"), Ids("f_u", "u", column="f")]
    made = export(tmp_path / "both", **given | {"tables": both, "features": {"user": several}})
    names = torchrec.KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([2]))
    with torch.no_grad():
        found = both(names).to_dict()
        wanted = user(found["f@t"], found["f@u"])
    assert np.allclose(made.reference.queries([{"f": [1, 2]}]), wanted, atol=1e-5)
    with pytest.raises(ExportError, match="table `t`: weight is on the device `meta`"):
        export(tmp_path / "shop", **given | {"tables": collection(("t", ["f"]), device=torch.device("meta")), "features": {"user": [Ids("f", "t")]}})
    rows = torchrec.EmbeddingCollection(tables=[torchrec.EmbeddingConfig(name="t", embedding_dim=6, num_embeddings=50, feature_names=["f"])])
    with pytest.raises(ExportError, match='an EmbeddingCollection feeds without pooling; declare the feature: Ids\\("f", "t", pooling="none"'):
        export(tmp_path / "shop", **given | {"user": One(2), "tables": rows})


class Attention(nn.Module):
    """Attention whose mask leaves nothing for a user without history."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(6, D)
        self.encoder = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True) if kind == "encoder" else None

    def forward(self, history, history_mask):
        x, is_there = self.layer(history), history_mask > 0.5
        if self.encoder:
            return (self.encoder(x, src_key_padding_mask=~is_there) * history_mask.unsqueeze(-1)).sum(1)
        x = x.unsqueeze(1)
        mask = is_there[:, None, None, :] if self.kind == "bool" else torch.where(is_there, 0.0, float("-inf"))[:, None, None, :]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).squeeze(1).sum(1)


@pytest.mark.parametrize("kind", ["bool", "float", "encoder"])
def test_attention_of_an_empty_history_is_as_in_pytorch(tmp_path, program, kind):
    torch.manual_seed(4)
    user = Attention(kind)
    rows = [{"id": n, "embedding": [float(n * k % 7) for k in range(D)]} for n in range(20)]
    made = bags(tmp_path / "shop", torch.randn(50, 6), Ids("history", "t", "none", length=6), user=user,
                samples=[{"history": [1, 2, 3]}, {"history": [4]}], items=rows, program=program)  # fmt: skip
    assert made.largest < 1e-4, str(made)
    assert np.allclose(made.reference.queries([{}])[0], 0, atol=1e-6)


class Mean(nn.Module):
    """The mean of a history, which is NaN for an empty one."""

    def __init__(self, least=0.0):
        super().__init__()
        self.layer, self.least = nn.Linear(6, D), least

    def forward(self, history, history_mask):
        return self.layer((history * history_mask.unsqueeze(-1)).sum(1) / history_mask.sum(1, keepdim=True).clamp(min=self.least))


class Log(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size.abs().log())


def test_a_module_without_an_answer_for_a_user_without_features_is_refused(tmp_path):
    sequence = Ids("history", "t", "none", length=6)
    with pytest.raises(ExportError, match="output `query` is not finite for random inputs, with `history` of nothing"):
        bags(tmp_path / "shop", torch.randn(50, 6), sequence, user=Mean())
    bags(tmp_path / "shop", torch.randn(50, 6), sequence, user=Mean(least=1.0))
    with pytest.raises(ExportError, match="output `query` is not finite .*`size` of nothing"):
        export(tmp_path / "other", user=Log(), samples=[SAMPLES[0]] * 3)


def test_examples_hold_every_length_and_a_user_without_features():
    from sterling import graphs

    ports = [graphs.Port("history", ("Q", 9, 2), is_sequence=True), graphs.Port("history_mask", ("Q", 9), is_mask=True),
             graphs.Port("age", ("Q", 3), may_be_missing=True), graphs.Port("tags", ("Q", "K0", 4, 2), is_sequence=True)]  # fmt: skip
    examples, lengths = graphs.Examples(ports, torch.Generator().manual_seed(1)), set()
    first = True
    while examples.are_left():
        history, mask, age, tags = examples.at({"Q": 3, "K0": 2})
        assert (mask.cummin(-1).values == mask).all() and (history[mask == 0] == 0).all() and history[mask == 1].all()
        lengths |= set(mask.sum(-1).int().tolist())
        assert not first or not (history[0].any() or age[0].any() or tags[0, 0].any())
        first = False
    assert lengths == set(range(10)) and tags.shape == (3, 2, 4, 2)
    assert len(graphs.Examples([graphs.Port("a_mask", ("Q", 4096), is_mask=True)], torch.Generator()).lengths["a"]) == graphs.LENGTHS_MAX


def test_a_difference_that_is_nan_is_one(tmp_path, monkeypatch):
    from sterling import graphs, parity

    assert max([0.0, parity.difference([1.0, 2.0], [float("nan"), 2.0])]) == parity.difference([float("nan")], [1.0]) == np.inf

    class Roots(nn.Module):
        def forward(self, x):
            return {"query": -x.abs()}

    # The graph computes the root of a negative number.
    port, kind = graphs.Port("x", ("Q", D)), onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Abs", ["x"], ["a"]), onnx.helper.make_node("Neg", ["a"], ["b"]), onnx.helper.make_node("Sqrt", ["b"], ["query"])]
    values = [[onnx.helper.make_tensor_value_info(name, kind, ["Q", D])] for name in ("x", "query")]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", *values), opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    graph = graphs.Graph("user.onnx", graphs._positional("user", Roots(), ["x"], "query"), (port,), {"query": ("Q", D)}, model, None)
    pytest.importorskip("onnxruntime")
    assert graphs._difference("user", graph, torch.Generator().manual_seed(1)) == np.inf
    assert graph.differs_for() == "with all features"
    monkeypatch.setattr(graphs, "_difference", lambda *_: np.inf)
    refused(tmp_path, "user.onnx: differs from PyTorch by inf, expected at most 1e-03; most with")


@pytest.mark.parametrize("name", ["cat", "linear", "relu", "val_0", "item", "add", "layer.weight"])
def test_features_may_have_the_names_of_operators(tmp_path, name):
    class Named(Bags):
        def forward(self, a, b):
            return torch.relu(self.layer(torch.cat([a, b], 1)))

    class Positional(Bags):
        def forward(self, *inputs):
            return torch.relu(self.layer(torch.cat(inputs, 1)))

    some = {"user": [Ids("a", "t"), Ids(name, "t")]}
    made = bags(tmp_path / "shop", torch.randn(50, 6), user=Positional(2), features=some)
    assert [value.name for value in made.reference.user.model.graph.input] == ["a", name]
    assert made.largest < 1e-4


def test_a_feature_that_is_called_like_another_output_is_refused(tmp_path):
    class Asked(Bags):
        def forward(self, encoded):
            return {"query": self.layer(encoded), "encoded": encoded}

    with pytest.raises(ExportError, match='user: `encoded` is an input and an output, expected one meaning: .*column="encoded"'):
        bags(tmp_path / "shop", torch.randn(50, 6), Ids("encoded", "t"), user=Asked())


def users(count):
    return [{"installed": np.array([n, n + 1]), "section": ["web"], "size": [0.1, 0.2, n / 10]} for n in range(count)]


def test_samples_are_written_as_requests_to_calibrate_with(tmp_path, program):
    made = export(tmp_path / "shop", samples=users(16), program=program)
    lines = [json.loads(line) for line in (made.path / "queries.jsonl").read_text().splitlines()]
    assert lines[3] == {"features": {"installed": [3, 4], "section": ["web"], "size": [0.1, 0.2, 0.3]}} and len(lines) == 16
    # Few samples say too little about the recall of other users, and the file of an older export belongs to another model.
    with pytest.warns(UserWarning, match="samples: 15 users' features are given, expected at least 16"):
        made = export(tmp_path / "shop", samples=users(15), items=None)
    assert not {"queries.jsonl", "items.jsonl"} & {path.name for path in made.path.iterdir()}


def test_an_export_that_is_killed_leaves_the_old_package(tmp_path, monkeypatch):
    from sterling import exporting

    export(tmp_path / "shop", samples=users(16))
    (tmp_path / "shop/warmup.jsonl").write_text("kept")
    (tmp_path / "shop/data").mkdir()
    (tmp_path / "shop/data/notes").write_text("kept")
    read = lambda: {path: path.read_bytes() for path in (tmp_path / "shop").rglob("*") if path.is_file()}  # noqa: E731
    before, exchange = read(), exporting._exchange

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_exchange", killed)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "shop", description="newer")
    assert read() == before
    # Two renames, for systems that cannot swap two folders in one step.
    monkeypatch.setattr(exporting, "_exchange", exchange)
    monkeypatch.setattr(exporting.sys, "platform", "other")
    (tmp_path / "link").symlink_to(tmp_path / "shop")
    made = export(tmp_path / "link", description="newer", items=None)
    after = {path.name: data for path, data in read().items()}
    assert "newer" in after["model.toml"].decode() and after["warmup.jsonl"] == after["notes"] == b"kept"
    assert not {"items.jsonl", "queries.jsonl"} & set(after) and made.path.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "shop"]


def test_values_that_are_missing_are_the_same_in_pytorch(tmp_path, program):
    rows = [row | ({"popularity": float("nan")} if n % 3 else {}) | {"section": ("web", "admin", "web")} for n, row in enumerate(items())]
    of_items = {"overarch": [Category("tags", "sections", "none", length=2, keep="first", column="section")]}
    made = export(tmp_path / "shop", overarch=Tagged(), tasks=["click"], value="click", constants=None, items=rows, features=features() | of_items,
                  program=program)  # fmt: skip
    assert made.largest < 1e-4, str(made)
    export(tmp_path / "other", items=rows, program=program)


def test_a_collection_that_a_tower_calls_is_refused(tmp_path):
    torchrec = pytest.importorskip("torchrec")

    class Inside(User):
        def __init__(self):
            super().__init__()
            self.bags = torchrec.EmbeddingBagCollection(
                tables=[torchrec.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=3, feature_names=["f"])]
            )

        def forward(self, installed, section, size):
            return super().forward(installed, self.bags(section), size)

    refused(tmp_path, "user: `bags` is a EmbeddingBagCollection; lookups stand outside the graph", user=Inside())


class Fixed(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size).reshape(5, D)


class Branch(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size) * (2 if installed.sum() > 0 else 1)


class Half(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size).double().sin().float()


class Unread(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size * 0 + 1 if False else torch.ones_like(section[:, :3]))


class Infinite(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size) / 0


class Keywords(User):
    def forward(self, **inputs):
        return super().forward(**inputs)


class Narrow(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size)[:, :4]


class Flat(User):
    def forward(self, installed, section, size):
        return super().forward(installed, section, size).sum(0)


class Unnamed(User):
    def forward(self, installed, section, size):
        return (super().forward(installed, section, size),)


class Colour(User):
    def forward(self, installed, section, colour):
        return super().forward(installed, section, colour)


def nan_user():
    user = User()
    user.layer.weight.data[0, 0] = float("nan")
    return user


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (Fixed(), "user: forward fixes the axis Q"),
        (Branch(), "user: PyTorch cannot export the module"),
        (Half(), "computed in DOUBLE, expected float32"),
        (Unread(), "user: forward does not read size"),
        (Infinite(), "output `query` is not finite"),
        (Keywords(), r"user: forward takes \*\*inputs"),
        (Narrow(), "`item` is 8 wide, expected 4"),
        (Flat(), r"output `query` has shape \[8\], expected \[5\] and more"),
        (Unnamed(), "returned tuple, expected a tensor or a mapping"),
        (Colour(), "user: forward takes `colour`, which is no feature, expected some of: installed, section, size"),
        (User().half(), "`layer.weight` is float16, expected float32: call .float()"),
        (nan_user(), "`layer.weight` holds a number that is not finite"),
        (lambda installed: installed, "user: got function, expected a torch.nn.Module"),
        (nn.Linear(3, D), "user: forward takes `input`, which is no feature"),
    ],
)
def test_towers_that_make_no_package(tmp_path, user, said):
    refused(tmp_path, said, user=user)

class Plain(nn.Module):
    """Takes a history and its mask, and applies ``compute``."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, history, history_mask):
        return self.compute(self, history, history_mask)


def of_history(path, user, **changes):
    return bags(path, torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), Ids("history", "t", "none", length=5), user=user, **changes)


@pytest.mark.parametrize("exporter", sterling.exporters.EXPORTERS)
def test_both_exporters_write_the_same_package(tmp_path, exporter):
    made = export(tmp_path / "shop", exporter=exporter)
    assert made.largest < 1e-5 and {port.name for port in made.reference.user.inputs} == {"installed", "section", "size"}
    # A trace would write an `If` for an axis that is squeezed.
    last = Plain(lambda s, x, m: x.gather(1, (m.sum(1).long() - 1).clamp(min=0).view(-1, 1, 1).expand(-1, -1, 6)).squeeze(1))
    made = of_history(tmp_path / "last", last, exporter=exporter)
    assert made.largest == 0 and "If" not in {node.op_type for node in made.reference.user.model.graph.node}
    with pytest.raises(ExportError, match="exporter `onnx`, expected one of: dynamo, torchscript"):
        export(tmp_path / "shop", exporter="onnx")


def test_modules_come_in_wrappers(tmp_path):
    user = User()
    refused(tmp_path, "user: got a .*ScriptModule of TorchScript, expected the torch.nn.Module", user=torch.jit.script(user))
    for n, given in enumerate([torch.compile(user), nn.DataParallel(user)]):
        made = export(tmp_path / f"shop{n}", user=given)
        with torch.no_grad():
            wanted = user(torch.ones(1, 6), torch.zeros(1, 4), torch.zeros(1, 3))
        assert torch.allclose(made.reference.user(installed=torch.ones(1, 6), section=torch.zeros(1, 4), size=torch.zeros(1, 3))["query"], wanted)


def test_parameters_that_nothing_feeds_are_left_out_where_they_have_a_default(tmp_path):
    class Optional(User):
        def forward(self, installed, section, size=None, mask=None, **more):
            assert mask is None and not more
            return super().forward(installed, section, size)

    assert [port.name for port in export(tmp_path / "shop", user=Optional()).reference.user.inputs] == ["installed", "section", "size"]


@pytest.mark.parametrize("exporter", sterling.exporters.EXPORTERS)
def test_a_feature_that_is_called_like_the_output_of_its_tower_is_renamed_in_the_graph(tmp_path, program, exporter):
    class Asked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, D)

        def forward(self, query, query_mask):
            return self.layer((query * query_mask.unsqueeze(-1)).sum(1))

    rows = [{"id": n, "embedding": [float(n * k % 7) for k in range(D)]} for n in range(20)]
    made = bags(tmp_path / "shop", torch.randn(50, 6), Ids("query", "t", "none", length=4), user=Asked(), exporter=exporter,
                samples=[{"query": [3, 5, 9]}], items=rows, program=program)  # fmt: skip
    assert made.differences["served"] < 1e-5
    declared = tomllib.loads((made.path / "model.toml").read_text())["user"]["features"]
    assert [(feature["name"], feature["column"]) for feature in declared] == [("query_feature", "query")]


def test_a_softmax_of_nothing_is_zero(tmp_path, program):
    torch.manual_seed(5)
    parts = {"layer": nn.Linear(6, D), "attention": nn.MultiheadAttention(D, 2, batch_first=True)}
    rows = [{"id": n, "embedding": [float(n * k % 7) for k in range(D)]} for n in range(20)]

    def weighted(s, x, m):
        x = s.layer(x)
        attended, weights = s.attention(x, x, x, key_padding_mask=m < 0.5)
        pooled = torch.softmax(x.sum(-1).masked_fill(m < 0.5, float("-inf")), 1).unsqueeze(-1)
        return (attended * pooled).sum(1) + weights.sum((1, 2)).unsqueeze(1)

    for exporter in sterling.exporters.EXPORTERS:
        made = of_history(tmp_path / exporter, Plain(weighted, **parts), exporter=exporter, items=rows, samples=[{"history": [1, 2]}], program=program)
        assert made.largest < 1e-5 and np.allclose(made.reference.queries([{}]), 0, atol=1e-6), str(made)
    # PyTorch's own numbers where there is something.
    x, m = torch.randn(2, 5, 6), torch.tensor([[1.0] * 5, [1.0] + [0.0] * 4])
    with torch.no_grad():
        assert torch.allclose(made.reference.user(history=x, history_mask=m)["query"], weighted(Plain(weighted, **parts), x, m), atol=1e-6)


class Branching(nn.Module):
    def forward(self, history, history_mask):
        return history.sum(1) * (2 if history_mask.sum() > 0 else 1)


def packed(s, x, m):
    rows = nn.utils.rnn.pack_padded_sequence(x, m.sum(1).long().clamp(min=1), batch_first=True, enforce_sorted=False)
    return s.gru(rows)[1][-1]


def meta():
    with torch.device("meta"):
        return nn.Linear(6, D)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (Plain(lambda s, x, m: torch.special.bessel_j0(x).sum(1)), r"bessel_j0.*; ONNX has no operator for it"),
        (Branching(), r"in forward, test_export.py:\d+; forward decides by the values of a tensor .* use torch.where or a mask"),
        (Plain(packed, gru=nn.GRU(6, D, batch_first=True)), "packed sequences cannot be exported; run the module over the padded rows"),
        (Plain(lambda s, x, m: x.sum(1) / m.sum(1, keepdim=True)), r"first by `div` in <lambda>, test_export.py:\d+; divide by at least"),
        (Plain(lambda s, x, m: x.masked_fill(m.unsqueeze(-1) < 1, -np.inf).amax(1)), r"`history` of nothing, first by `amax` .*; fill with a finite number"),
        (Plain(lambda s, x, m: s.layer(x).sum(1), layer=nn.LazyLinear(D)), "`layer.weight` has no shape yet; run the module once before"),
        (Plain(lambda s, x, m: s.layer(x).sum(1), layer=meta()), "`layer.weight` is on the device `meta`"),
        (Plain(lambda s, x, m: s.other(x)), "forward failed on history .*no attribute 'other'"),
    ],
)
def test_a_refused_module_is_told_the_line_and_a_remedy(tmp_path, user, said):
    with pytest.raises(ExportError, match=f"(?s)^user: .*{said}"):
        of_history(tmp_path / "shop", user)


def test_modules_of_transformers_are_exported_as_they_are(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=2, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)

    def last(s, x, m):
        states = s.model(inputs_embeds=s.layer(x), attention_mask=m, use_cache=False).last_hidden_state
        return states[torch.arange(x.shape[0]), (m.sum(1).long() - 1).clamp(min=0)]

    for exporter in sterling.exporters.EXPORTERS:
        user = Plain(last, layer=nn.Linear(6, 16), model=transformers.LlamaModel(config))
        assert of_history(tmp_path / exporter, user, exporter=exporter).largest < 1e-5


def test_a_collection_that_processes_its_features_is_refused(tmp_path):
    processed = pytest.importorskip("torchrec.modules.fp_embedding_modules").FeatureProcessedEmbeddingBagCollection
    processors = pytest.importorskip("torchrec.modules.feature_processor_")
    inner = collection(("t", ["f"]), is_weighted=True)
    table = processed(inner, processors.PositionWeightedModuleCollection({"f": 10}))
    refused(tmp_path, "a FeatureProcessedEmbeddingBagCollection changes what its EmbeddingBagCollection looks up", tables=table)


def test_a_module_may_hold_the_collection_that_is_looked_up_outside(tmp_path):
    models = pytest.importorskip("torchrec.models.dlrm")
    dlrm = models.DLRM(collection(("a", ["a"]), ("b", ["b"])), 3, [D, 6], [D, 1])

    class Towerlike(nn.Module):
        def __init__(self):
            super().__init__()
            self.dlrm = dlrm

        def forward(self, a, b, size):
            return self.dlrm.inter_arch(self.dlrm.dense_arch(size), torch.stack([a, b], 1))

    user, looked = Towerlike(), torch.randn(1, 2, 6)
    given = dict(user=user, item=None, overarch=None, tasks=[], value=None, constants=None, samples=(), items=None)
    made = export(tmp_path / "shop", **given, tables=dlrm, features={"user": [Dense("size", 3)]})
    with torch.no_grad():
        wanted = user(looked[:, 0], looked[:, 1], torch.ones(1, 3))
    assert torch.allclose(made.reference.user(a=looked[:, 0], b=looked[:, 1], size=torch.ones(1, 3))["query"], wanted, atol=1e-6)
    assert sorted(made.reference.tables) == ["a", "b"] and made.largest < 1e-5


def with_features(side, *some):
    return features() | {side: list(some)}


USER = features()["user"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"features": with_features("user", *USER, Ids("more", "packages"))}, "user.features `more`: no graph reads this feature"),
        ({"features": with_features("user", *USER, USER[0])}, "user.features: `installed` is given twice"),
        ({"features": with_features("user", Ids("installed", "nothing"), *USER[1:])}, "table `nothing` is not given, expected one of: packages"),
        ({"features": with_features("user", USER[0], Category("section", "packages"), USER[2])}, "table `packages` has no vocabulary"),
        ({"features": with_features("user", USER[0], USER[1], Dense("size", 4))}, "feature `size`: 3 numbers, expected 4"),
        ({"features": features() | {"users": []}}, "features of `users`, expected features of user, item or overarch"),
        ({"features": features() | {"overarch": [Dense("popularity")]}}, "overarch.features `popularity`"),
        ({"tables": tables() | {"more": nn.Embedding(3, 4)}}, "table `more`: no feature reads this table"),
        ({"tables": tables() | {"packages": nn.EmbeddingBag(50, 6, mode="max")}}, "table `packages`: mode `max`, expected one of: sum, mean"),
        ({"tables": tables() | {"packages": nn.Embedding(50, 6, max_norm=1)}}, "table `packages`: max_norm"),
        ({"tables": tables() | {"packages": nn.EmbeddingBag(50, 6, mode="mean", padding_idx=0)}}, "padding_idx 0 with mode `mean`"),
        ({"tables": tables() | {"packages": nn.Linear(3, 4)}}, "table `packages`: got Linear"),
        ({"tables": tables() | {"packages": torch.zeros(3)}}, r"weight has shape \[3\], expected \[rows, width\]"),
        ({"tables": tables() | {"packages": torch.zeros(3, 6, dtype=torch.int64)}}, "weight is int64"),
        ({"tables": tables() | {"packages": "file"}}, "table `packages`: str is no tensor"),
        ({"tables": tables() | {"sections": Table(torch.ones(3, 4), vocabulary=list("abcd"))}}, "vocabulary of 4 values for 3 rows"),
        ({"tables": tables() | {"sections": Table(torch.ones(3, 4), vocabulary=list("aba"))}}, "vocabulary holds `a` twice"),
        ({"tables": tables() | {"sections": Table(torch.ones(3, 4), vocabulary=["a\nb"])}}, "expected values without line breaks"),
        ({"tables": 7}, "tables: got int"),
        ({"tasks": ["click"]}, r"`logits` has shape \['Q', 'K0', 2\], expected \['Q', 'K0', 1\] for the tasks click"),
        ({"tasks": []}, "tasks are missing"),
        ({"overarch": None}, "tasks are given without overarch"),
        ({"value": None}, "constants are given without value"),
        ({"constants": {"w": float("nan")}}, "`w`: nan"),
        ({"columns": ["section"]}, "overarch: forward takes `popularity`, which is neither"),
        ({"items": [{"id": 1, "section": "admin"}]}, "`popularity`, which is neither a column of the items"),
        ({"items": [{"id": 1, "popularity": "high"}]}, "has 'high', expected a number"),
        ({"items": [{"section": "admin", "popularity": 1}]}, "no `id`"),
        ({"samples": [{"color": 1}]}, "samples: `color` is no feature of the user, expected some of: installed, section, size"),
        ({"merge": "all"}, "merge `all`"),
        ({"dimension": 9}, "`query` is 8 wide, expected 9"),
        ({"queries": [Query("a"), Query("b")]}, r"output `query` has shape"),
        ({"item_vectors": [ItemVector("parts", 4)]}, "item vector `parts`: the item tower makes"),
        ({"tolerance": 0.0}, "differs from PyTorch by"),
        ({"user": None}, "features of `user` are given without user"),
        ({"program": "/nowhere/sterling"}, "is no program"),
    ],
)
def test_what_makes_no_package_is_refused_with_its_name(tmp_path, changes, said):
    kind = sterling.ProgramError if "program" in changes else ExportError
    with pytest.raises(kind, match=said):
        export(tmp_path / "shop", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_towers_has_a_reranker(tmp_path):
    rows = [{"id": n, "embedding": np.random.default_rng(n).normal(size=D).tolist(), "popularity": 1.0} for n in range(9)]
    made = export(tmp_path / "shop", user=None, item=None, dimension=D, features=None, tables=None, samples=(), items=rows,
                  columns=[Column("popularity", filter=False)])  # fmt: skip
    spec = tomllib.loads((made.path / "model.toml").read_text())
    assert "user" not in spec and "tables" not in spec and spec["item"] == {"columns": [{"name": "popularity", "filter": False}]}
    with pytest.raises(ExportError, match="no user tower"):
        made.reference.queries([{}])
    with pytest.raises(ExportError, match="dimension is missing"):
        export(tmp_path / "other", user=None, item=None, features=None, tables=None)


def test_the_examples_of_the_readme_run(tmp_path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STERLING", str(program))
    pytest.importorskip("httpx")
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) == 4
    scope = {}
    for block in blocks:
        exec(block, scope)
    assert scope["exported"].differences["served"] < 1e-4
    assert sorted(scope["again"].ids) == sorted(scope["best"].ids)
    assert len(scope["answer"]["items"]) == 5 and scope["vectors"].shape == (1000, 32)
