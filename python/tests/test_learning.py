"""State of training from PyTorch to ``sterling train``, and back."""

import json

import numpy as np
import pytest

import sterling
from sterling.weights import weights

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

ROWS, D, BATCH, STEPS = 40, 8, 16, 40
TRAIN = """
[train]
label = "click"
batch = 16
uniform = 0
log_q = false
temperature = 0.2
optimizer = { kind = "KIND", rate = 0.05, epsilon = 1e-6 }
dense_optimizer = { kind = "adam", rate = 0.01, epsilon = 1e-4 }
"""


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(D, 12), torch.nn.Linear(12, D)

    def forward(self, rows):
        return torch.nn.functional.normalize(self.second(torch.relu(self.first(rows))), dim=1)


class Model:
    """Two towers over two tables, and their steps in PyTorch."""

    def __init__(self, kind):
        torch.manual_seed(3)
        self.users, self.items = (torch.nn.Embedding(ROWS, D, sparse=kind == "adam") for _ in range(2))
        self.user, self.item = Tower(), Tower()
        tables = [self.users.weight, self.items.weight]
        rule = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}[kind]
        self.sparse = rule(tables, lr=0.05, eps=1e-6)
        self.dense = torch.optim.Adam([*self.user.parameters(), *self.item.parameters()], lr=0.01, eps=1e-4)

    def step(self, events):
        ids = torch.tensor([event["user"]["rows"] for event in events])
        took = [event["item"] for event in events]
        distinct = sorted(set(took))
        scores = self.user(self.users(ids).mean(1)) @ self.item(self.items(torch.tensor(distinct))).T / 0.2
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor([distinct.index(n) for n in took]))
        self.sparse.zero_grad()
        self.dense.zero_grad()
        loss.backward()
        self.sparse.step()
        self.dense.step()
        return loss.item()

    def export(self, path, kind):
        features = {"user": [sterling.Ids("rows", "users", "mean")], "item": [sterling.Ids("rows", "items", column="id")]}
        tables = {"users": self.users.weight.detach(), "items": self.items.weight.detach()}
        items = [{"id": n} for n in range(ROWS)]
        sterling.export(path, user=self.user, item=self.item, tables=tables, features=features, items=items, program=False)
        with (path / "model.toml").open("a") as file:
            file.write(TRAIN.replace("KIND", kind))


def events():
    rng = np.random.default_rng(1)
    rows = rng.integers(0, ROWS, (2 * STEPS * BATCH, 3))
    return [{"user": {"rows": r.tolist()}, "item": int(r[0] * 7 + 3) % ROWS, "labels": {"click": 1}} for r in rows]


@pytest.mark.filterwarnings("ignore:samples")
@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_training_continues_from_pytorch_and_back(tmp_path, program, kind):
    model, lines = Model(kind), events()
    batches = [lines[n : n + BATCH] for n in range(0, len(lines), BATCH)]
    for batch in batches[:STEPS]:
        model.step(batch)
    package = tmp_path / "package"
    model.export(package, kind)
    tables = {"users": model.users.weight, "items": model.items.weight}
    sterling.write_optimizer(package, model.sparse, model.dense, tables=tables, user=model.user, item=model.item)
    # Rows of Adam count their own updates, so that later steps differ from PyTorch's, which counts those of all rows.
    rest = batches[STEPS:] if kind == "adagrad" else batches[STEPS : STEPS + 1]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for batch in rest for event in batch))
    report = sterling.train(package, tmp_path / "events.jsonl", tmp_path / "learned", program=program)
    losses = [model.step(batch) for batch in rest]
    assert report["loss"] == pytest.approx(np.mean(losses), rel=1e-4)

    trained = sterling.load_trained(tmp_path / "learned")
    for name, table in (("users", model.users), ("items", model.items)):
        np.testing.assert_allclose(trained.tables[name], table.weight.detach().numpy(), atol=2e-4)
    for name, module in (("user", model.user), ("item", model.item)):
        here = Tower()
        here.load_state_dict({key: torch.from_numpy(value) for key, value in trained.parameters[name].items()})
        for got, want in zip(here.parameters(), module.parameters()):
            torch.testing.assert_close(got, want, atol=2e-4, rtol=0)
        moment = trained.state[f"graph.{name}.module.first.weight.moment.0"]
        np.testing.assert_allclose(moment, model.dense.state[module.first.weight]["exp_avg"].numpy(), atol=2e-4)
    sums = model.sparse.state[model.users.weight]["sum" if kind == "adagrad" else "exp_avg"].numpy()
    np.testing.assert_allclose(trained.state["table.users.state"][:, :D], sums, rtol=1e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:samples")
def test_what_a_package_does_not_have_is_named(tmp_path):
    model = Model("adagrad")
    model.step(events()[:BATCH])
    model.export(tmp_path / "package", "adagrad")
    given = {"tables": {"users": model.users.weight}, "user": model.user}
    with pytest.raises(sterling.ExportError, match="table `films`: the package has none"):
        sterling.write_optimizer(tmp_path / "package", model.sparse, tables={"films": model.users.weight})
    other = torch.nn.Sequential(torch.nn.Linear(3, 3))
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(sterling.ExportError, match=r"user.onnx: no parameter `0.weight` \[3, 3\]"):
        sterling.write_optimizer(tmp_path / "package", optimizer, user=other)
    with pytest.raises(sterling.ExportError, match="reranker: the package has no such graph"):
        sterling.write_optimizer(tmp_path / "package", optimizer, overarch=other)
    with pytest.raises(sterling.ExportError, match="table `users`: state \\['x'\\]"):
        sterling.write_optimizer(tmp_path / "package", tables={"users": {"x": np.zeros(3)}})
    momentum = torch.optim.SGD(model.user.parameters(), lr=0.1, momentum=0.9)
    momentum.step()
    with pytest.raises(sterling.ExportError, match="SGD with momentum"):
        sterling.write_optimizer(tmp_path / "package", momentum, user=model.user)
    sterling.write_optimizer(tmp_path / "package", model.sparse, model.dense, **given)
    fused = {"users": {"momentum1": np.ones(ROWS)}}
    sterling.write_optimizer(tmp_path / "package", tables=fused)
    assert sterling.load_trained(tmp_path / "package").state["table.users.state"].shape == (ROWS, 1)


def test_broken_graphs_are_refused(tmp_path):
    onnx = pytest.importorskip("onnx")
    tensor = onnx.numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "module.w.x")
    whole = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
    np.testing.assert_array_equal(weights(whole)["w.x"], np.arange(6).reshape(2, 3))
    for end in range(1, len(whole)):
        try:
            weights(whole[:end])
        except sterling.SnapshotError:
            pass
