"""Users and items without values, over towers of PyTorch's own masked modules: a finite answer, or a rejected export. Skipped without
PyTorch."""

import contextlib
import json
import time

import numpy as np
import pytest
import sterling
from sterling import Ids

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

W, S = 8, 4


def attention():
    return nn.MultiheadAttention(W, 2, batch_first=True)


def layer():
    return nn.TransformerEncoderLayer(W, 2, 16, batch_first=True, dropout=0.0)


def total(x, m):
    return (x * m.unsqueeze(-1)).sum(1)


def last(x, m):
    return x[torch.arange(x.shape[0]), (m.sum(1).long() - 1).clamp(min=0)]


# Computation of each from rows x [Q, 4, 8], their mask m [Q, 4] and its module p.
DEFINED = {
    "masked mean": (lambda p, x, m: total(x, m) / m.sum(1, keepdim=True).clamp(min=1), None),
    "MultiheadAttention": (lambda p, x, m: total(p(x, x, x, key_padding_mask=m < 0.5, need_weights=False)[0], m), attention),
    "MultiheadAttention with weights": (lambda p, x, m: p(x, x, x, key_padding_mask=m < 0.5)[0].sum(1), attention),
    "query over the history": (lambda p, x, m: p(x.sum(1, keepdim=True), x, x, key_padding_mask=m < 0.5)[0].squeeze(1), attention),
    "TransformerEncoderLayer": (lambda p, x, m: total(p(x, src_key_padding_mask=m < 0.5), m), layer),
    "TransformerEncoder": (lambda p, x, m: last(p(x, src_key_padding_mask=m < 0.5), m), lambda: nn.TransformerEncoder(layer(), 2)),
    "attention pooling": (lambda p, x, m: total(x, torch.softmax(p(x).squeeze(-1).masked_fill(m < 0.5, -torch.inf), 1)), lambda: nn.Linear(W, 1)),
    "scaled_dot_product_attention": (lambda p, x, m: F.scaled_dot_product_attention(x, x, x, attn_mask=(m > 0.5).unsqueeze(1)).sum(1), None),
    "last state": (lambda p, x, m: last(p(x), m), lambda: nn.Linear(W, W)),
    "GRU": (lambda p, x, m: last(p(x)[0], m), lambda: nn.GRU(W, W, batch_first=True)),
    "maximum": (lambda p, x, m: x.masked_fill(m.unsqueeze(-1) < 0.5, torch.finfo(x.dtype).min).amax(1) * m.amax(1, keepdim=True), None),
    "normalized sum": (lambda p, x, m: F.normalize(total(x, m), dim=-1), None),
}
REFUSED = {
    "mean": (lambda p, x, m: total(x, m) / m.sum(1, keepdim=True), None, "`div` .*clamp"),
    "norm": (lambda p, x, m: total(x, m) / total(x, m).norm(dim=-1, keepdim=True), None, "`div` .*F.normalize"),
    "maximum of -inf": (lambda p, x, m: x.masked_fill(m.unsqueeze(-1) < 0.5, -torch.inf).amax(1), None, "`amax` .*finite number"),
    "logarithm": (lambda p, x, m: torch.log(total(x, m).abs()), None, "`log` .*clamp"),
    "last by -1": (lambda p, x, m: x.gather(1, (m.sum(1).long() - 1).view(-1, 1, 1).expand(-1, -1, W)).squeeze(1), None, "forward failed on history"),
    "packed": (lambda p, x, m: p(nn.utils.rnn.pack_padded_sequence(x, m.sum(1).long(), batch_first=True, enforce_sorted=False))[1][-1],
               lambda: nn.GRU(W, W, batch_first=True), "forward failed on history"),
}  # fmt: skip


class Tower(nn.Module):
    def __init__(self, compute, part):
        super().__init__()
        self.compute, self.part = compute, part() if part else None

    def forward(self, history, history_mask):
        return self.compute(self.part, history, history_mask)


def export(path, compute, part, side="user"):
    torch.manual_seed(1)
    table, feature = torch.randn(30, W), Ids("history", "t", "none", length=S)
    rows = [{"id": n, "embedding": row} for n, row in enumerate(table.tolist())]
    if side == "item":
        rows = [{"id": n, "history": list(range(n % (S + 1)))} for n in range(30)]
    return sterling.export(path, tables={"t": table}, features={side: [feature]}, items=rows, program=False, exporter="torchscript", **{side: Tower(compute, part)})


def loaded(server, name):
    """Waits until a model of a store with several is loaded."""
    for _ in range(300):
        with contextlib.suppress(sterling.RequestError):
            return server.get(f"/v1/models/{name}")
        time.sleep(0.1)
    raise TimeoutError(name)


@pytest.mark.filterwarnings("ignore:samples")
def test_users_and_items_without_values_have_a_finite_answer(tmp_path, program):
    store, recipe = tmp_path / "store", tmp_path / "recipe.toml"
    recipe.write_text('[index]\nrescore = "f32"\n')
    made = {}
    for n, (compute, part) in enumerate(DEFINED.values()):
        made[f"user{n}"] = export(tmp_path / f"user{n}", compute, part)
        sterling.publish(tmp_path / f"user{n}", store, index=recipe, program=program)
    # An item tower, with items without values; they are embedded when the version is published.
    compute, part = DEFINED["TransformerEncoderLayer"]
    made["item"] = export(tmp_path / "item", compute, part, "item")
    sterling.publish(tmp_path / "item", store, index=recipe, program=program)
    with sterling.serve(store, program=program) as server:
        for name in made:
            loaded(server, name)
        for n, name in enumerate(DEFINED):
            for features in ({}, {"history": []}, {"history": [3]}, {"history": list(range(S))}, {"history": list(range(2 * S))}, {"history": [10**9]}):
                found = server.post(f"/v1/models/user{n}:embed", {"features": features})["embedding"]
                wanted = made[f"user{n}"].reference.queries([features])[0]
                assert np.isfinite(found).all() and np.allclose(found, wanted, atol=1e-5), f"{name}, {features}"
            answer = server.post(f"/v1/models/user{n}:retrieve", {"features": {}, "k": 30, "exact": True})["items"]
            assert len(answer) == 30 and all(np.isfinite(item["similarity"]) for item in answer), name
        answer = server.post("/v1/models/item:retrieve", {"vector": [1.0] * W, "k": 30, "exact": True})["items"]
        wanted = made["item"].reference.items([json.loads(line)["attributes"] | {"id": n} for n, line in enumerate((tmp_path / "item/items.jsonl").open())])
        assert len(answer) == 30
        for item in answer:
            assert abs(item["similarity"] - wanted[item["id"]].sum()) < 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_a_tower_without_an_answer_for_nothing_is_refused_with_a_remedy(tmp_path, name):
    compute, part, said = REFUSED[name]
    with pytest.raises(sterling.ExportError, match=f"(?s)^user: .*{said}"):
        export(tmp_path / "shop", compute, part)
