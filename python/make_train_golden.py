"""Writes golden files for tables in training, computed by the libraries whose semantics they follow.

Writes tests/golden/train/*.json: problems (tables, features, 20 batches of ids and gradients) and cases, each an optimizer on a problem
with the rows that come out. The tests read only the files. To recreate them on a CPU:

    pip install torch==2.14.0 fbgemm-gpu-cpu==1.9.0 numpy && pip install --no-deps torchrec==1.9.2
    pip install --no-deps torchmetrics lightning-utilities pyre-extensions typing-inspect mypy-extensions iopath tensordict tqdm \
        portalocker cloudpickle orjson packaging importlib-metadata zipp pyvers psutil
    python python/make_train_golden.py

The source of a case is

- `fbgemm`: FBGEMM's fused backward pass on the CPU, where it follows its documentation;
- `autograd`: gradients by PyTorch's autograd in f64 and the optimizer's formula in f64, which stand in where FBGEMM's CPU kernels are
  wrong (`fbgemm` then has the result of those kernels, for the record) or have no such optimizer;
- `torch`: an optimizer of PyTorch in f32 on sparse gradients;
- `torchrec`: TorchRec's fused modules, as its own tests run them (`test_fused_embedding_modules.py`).
"""

import json
from pathlib import Path

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from fbgemm_gpu.tbe.config.optimizer_config import WeightDecayMode
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "train"
STEPS = 20
EXAMPLES = 5
TABLES = {"products": (40, 12), "tags": (15, 20)}
SHARED = {"seen": "products", "liked": "products", "tag": "tags", "mark": "tags"}
ALONE = {"seen": "products", "tag": "tags"}
KINDS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
RATES = {"sgd": 0.1, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.02, "rowwise_adam": 0.02}


def floats(tensor):
    """The f32 numbers as hexadecimal digits of their little-endian bytes."""
    return tensor.detach().float().contiguous().numpy().astype("<f4").tobytes().hex()


class Problem:
    """Tables, features and batches."""

    def __init__(self, name, features, weighted=False, beyond=False, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.name, self.features = name, features
        self.start = {n: torch.rand(rows, width, generator=generator) * 2 - 1 for n, (rows, width) in TABLES.items()}
        self.steps = []
        for _ in range(STEPS):
            lengths = torch.randint(0, 7, (len(features) * EXAMPLES,), generator=generator)
            ids = []
            for number, table in enumerate(features.values()):
                count = int(lengths[number * EXAMPLES : (number + 1) * EXAMPLES].sum())
                rows = TABLES[table][0]
                drawn = torch.randint(0, rows, (count,), generator=generator)
                # A few rows are frequent.
                drawn = torch.where(torch.rand(count, generator=generator) < 0.3, drawn % 3, drawn)
                ids.append(torch.where(drawn == 7, rows + 15, drawn) if beyond else drawn)
            ids = torch.cat(ids)
            weights = torch.rand(len(ids), generator=generator) * 2 - 0.5 if weighted else None
            width = sum(TABLES[table][1] for table in features.values())
            gradients = torch.randn(EXAMPLES, width, generator=generator) * 0.5
            self.steps.append((ids, lengths, weights, gradients))

    def json(self):
        steps = [
            {
                "ids": ids.tolist(),
                "lengths": lengths.tolist(),
                "weights": None if weights is None else floats(weights),
                "gradients": floats(gradients),
            }
            for ids, lengths, weights, gradients in self.steps
        ]
        start = [{"table": n, "rows": TABLES[n][0], "width": TABLES[n][1], "values": floats(t)} for n, t in self.start.items()]
        return {"features": [list(f) for f in self.features.items()], "start": start, "steps": steps}

    def fbgemm(self, kind, mean=False, **more):
        """Returns the rows after training with FBGEMM's CPU operator."""
        names = list(TABLES)
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, width in TABLES.values()],
            feature_table_map=[names.index(table) for table in self.features.values()],
            optimizer=KINDS[kind],
            learning_rate=RATES[kind],
            eps=1e-8,
            pooling_mode=PoolingMode.MEAN if mean else PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.WARNING,
            **more,
        )
        for weights, start in zip(module.split_embedding_weights(), self.start.values()):
            weights.copy_(start)
        for ids, lengths, weights, gradients in self.steps:
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            module(ids.clone(), offsets, weights).backward(gradients)
        return [weights.detach().clone() for weights in module.split_embedding_weights()]

    def autograd(self, kind, mean=False, decay=None, max_norm=None, clip=None):
        """Returns the rows after training with autograd and the formulas, in f64."""
        tables = {name: start.double().requires_grad_() for name, start in self.start.items()}
        zeros = {name: (torch.zeros_like(t), torch.zeros_like(t), torch.zeros(len(t)).double(), torch.zeros(len(t)).double()) for name, t in tables.items()}
        for ids, lengths, weights, gradients in self.steps:
            bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            outputs = []
            touched = {name: torch.zeros(len(table), dtype=torch.bool) for name, table in tables.items()}
            for number, table in enumerate(self.features.values()):
                mine = (bags // EXAMPLES == number) & (ids < TABLES[table][0])
                rows = tables[table][ids[mine]]
                if weights is not None:
                    rows = rows * weights[mine].double()[:, None]
                if mean:
                    rows = rows / lengths[bags[mine]].double()[:, None]
                pooled = torch.zeros(EXAMPLES, TABLES[table][1], dtype=torch.double)
                outputs.append(pooled.index_add(0, bags[mine] % EXAMPLES, rows))
                touched[table][ids[mine]] = True
            grads = torch.autograd.grad(torch.cat(outputs, 1), list(tables.values()), gradients.double())
            with torch.no_grad():
                for (name, table), gradient in zip(tables.items(), grads):
                    at = touched[name]
                    update(kind, table, gradient, zeros[name], at, decay, max_norm, clip)
        return [table.detach() for table in tables.values()]


def update(kind, table, gradient, state, at, decay, max_norm, clip):
    """One step of a rule on the touched rows; the formulas of FBGEMM's GPU kernels, Adam with a row's own number of updates."""
    rate, epsilon, beta1, beta2 = RATES[kind], 1e-8, 0.9, 0.999
    m, v, row_v, count = state
    w, g = table[at], gradient[at]
    if clip is not None:
        norm = g.norm(dim=1, keepdim=True)
        g = torch.where(norm > clip, g * clip / norm, g)
    if decay and "l2" in decay:
        g = g + decay["l2"] * w
    keep = 1 - rate * decay["decoupled"] if decay and "decoupled" in decay else 1.0
    count[at] += 1
    t = count[at][:, None]
    if kind == "sgd":
        change = g
    elif kind == "adagrad":
        v[at] += g * g
        change = g / (v[at].sqrt() + epsilon)
    elif kind == "rowwise_adagrad":
        row_v[at] += (g * g).mean(1)
        change = g / (row_v[at].sqrt() + epsilon)[:, None]
    else:
        m[at] = beta1 * m[at] + (1 - beta1) * g
        if kind == "adam":
            v[at] = beta2 * v[at] + (1 - beta2) * g * g
            second = v[at]
        else:
            row_v[at] = beta2 * row_v[at] + (1 - beta2) * (g * g).mean(1)
            second = row_v[at][:, None]
        change = m[at] / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + epsilon)
    w = keep * w - rate * change
    if max_norm is not None:
        norm = w.norm(dim=1, keepdim=True)
        w = torch.where(norm > max_norm, w * max_norm / norm, w)
    table[at] = w


def sparse_optimizer(problem, kind):
    """An optimizer of PyTorch on sparse gradients. SparseAdam counts steps for all rows together: every row is in every batch."""
    names = list(TABLES)
    modules = [torch.nn.EmbeddingBag.from_pretrained(problem.start[n].clone(), freeze=False, mode="sum", sparse=True) for n in names]
    parameters = [module.weight for module in modules]
    rate = RATES[kind]
    optimizer = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=rate),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=rate, eps=1e-8),
        "adam": lambda: torch.optim.SparseAdam(parameters, lr=rate, eps=1e-8),
    }[kind]()
    for ids, lengths, weights, gradients in problem.steps:
        optimizer.zero_grad()
        at, outputs = 0, []
        for number, table in enumerate(problem.features.values()):
            mine = lengths[number * EXAMPLES : (number + 1) * EXAMPLES]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mine.cumsum(0)[:-1]])
            part = slice(at, at + int(mine.sum()))
            outputs.append(modules[names.index(table)](ids[part], offsets, None if weights is None else weights[part]))
            at = part.stop
        torch.cat(outputs, 1).backward(gradients)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def fused_modules(problem, kind, mean):
    """TorchRec's fused collection, with the optimizer that its tests name."""
    import torchrec

    optimizer = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rowwise_adagrad": torchrec.optim.RowWiseAdagrad,
    }[kind]
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=width,
            feature_names=[f for f, table in problem.features.items() if table == name],
            pooling=PoolingType.MEAN if mean else PoolingType.SUM,
        )
        for name, (rows, width) in TABLES.items()
    ]
    module = FusedEmbeddingBagCollection(
        tables=configs,
        optimizer_type=optimizer,
        optimizer_kwargs={"lr": RATES[kind], "eps": 1e-8} if kind != "sgd" else {"lr": RATES[kind]},
        device=torch.device("cpu"),
        is_weighted=problem.steps[0][2] is not None,
    )
    state = module.state_dict()
    for name, start in problem.start.items():
        state[f"embedding_bags.{name}.weight"].copy_(start)
    keys = list(problem.features)
    for ids, lengths, weights, gradients in problem.steps:
        kjt = KeyedJaggedTensor.from_lengths_sync(keys=keys, values=ids, lengths=lengths, weights=weights)
        out = module(kjt)
        picked = torch.cat([out[key] for key in keys], 1)
        picked.backward(gradients)
    return [module.state_dict()[f"embedding_bags.{name}.weight"].detach().clone() for name in TABLES]


def all_rows(name, seed):
    """A problem whose every batch names every row, for optimizers that count steps for all rows together."""
    problem = Problem(name, ALONE, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for at, (_, _, weights, gradients) in enumerate(problem.steps):
        ids = torch.cat([torch.randperm(rows, generator=generator) for rows, _ in TABLES.values()])
        lengths = torch.tensor([8] * EXAMPLES + [3] * EXAMPLES)
        problem.steps[at] = (ids, lengths, weights, gradients)
    return problem


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    shared, weighted = Problem("shared", SHARED), Problem("weighted", SHARED, weighted=True, seed=2)
    alone, beyond = Problem("alone", ALONE, seed=3), Problem("beyond", ALONE, beyond=True, seed=4)
    alone_weighted, every = Problem("alone_weighted", ALONE, weighted=True, seed=5), all_rows("every", 6)
    problems = [shared, weighted, alone, beyond, alone_weighted, every]
    cases = []

    def case(source, problem, kind, rows, mean=False, wrong=None, **options):
        rule = {"kind": kind, "rate": RATES[kind], "epsilon": 1e-8, **options}
        one = {"source": source, "problem": problem.name, "rule": rule, "mean": mean, "rows": [floats(t) for t in rows]}
        cases.append(one if wrong is None else {**one, "fbgemm": [floats(t) for t in wrong]})

    for kind in KINDS:
        for problem in (shared, alone):
            for mean in (False, True):
                case("fbgemm", problem, kind, problem.fbgemm(kind, mean), mean)
        case("fbgemm", weighted, kind, weighted.fbgemm(kind))
    for mode, name in ((WeightDecayMode.L2, "l2"), (WeightDecayMode.DECOUPLE, "decoupled")):
        decay, more = {name: 0.3}, {"weight_decay": 0.3, "weight_decay_mode": mode}
        case("fbgemm", shared, "rowwise_adagrad", shared.fbgemm("rowwise_adagrad", **more), decay=decay)
        rows, wrong = alone.autograd("rowwise_adagrad", decay=decay), alone.fbgemm("rowwise_adagrad", **more)
        case("autograd", alone, "rowwise_adagrad", rows, wrong=wrong, decay=decay)
    rows, wrong = alone.autograd("rowwise_adagrad", max_norm=1.5), alone.fbgemm("rowwise_adagrad", max_norm=1.5)
    case("autograd", alone, "rowwise_adagrad", rows, wrong=wrong, max_norm=1.5)
    for kind in KINDS:
        rows, wrong = alone_weighted.autograd(kind, mean=True), alone_weighted.fbgemm(kind, mean=True)
        case("autograd", alone_weighted, kind, rows, mean=True, wrong=wrong)
    case("autograd", beyond, "rowwise_adagrad", beyond.autograd("rowwise_adagrad"), wrong=beyond.fbgemm("rowwise_adagrad"))
    for kind in ("adam", "rowwise_adam"):
        case("autograd", shared, kind, shared.autograd(kind))
        case("autograd", weighted, kind, weighted.autograd(kind, mean=True), mean=True)
        case("autograd", shared, kind, shared.autograd(kind, decay={"decoupled": 0.3}), decay={"decoupled": 0.3})
        case("autograd", shared, kind, shared.autograd(kind, decay={"l2": 0.3}, clip=1.0), decay={"l2": 0.3}, clip=1.0)
    for kind in ("sgd", "adagrad"):
        case("torch", weighted, kind, sparse_optimizer(weighted, kind))
    case("torch", every, "adam", sparse_optimizer(every, "adam"))
    for kind in KINDS:
        case("torchrec", shared, kind, fused_modules(shared, kind, False))
        case("torchrec", alone, kind, fused_modules(alone, kind, True), mean=True)

    for one in cases:
        rule = {key: value for key, value in one["rule"].items() if key not in ("rate", "epsilon")}
        print(one["source"], one["problem"], "mean" if one["mean"] else "sum", rule)
    (OUT / "problems.json").write_text(json.dumps({p.name: p.json() for p in problems}, separators=(",", ":")) + "\n")
    (OUT / "cases.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
