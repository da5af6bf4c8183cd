"""Compares compiled graphs of known models with ONNX Runtime on one thread, alternating, and prints a table.

    cargo bench -p sterling-graph --bench towers --no-run
    pip install numpy onnx onnxruntime onnxscript torch
    python python/bench_models.py [BENCH] [NAME...]

BENCH is the built bench, by default the newest target/release/deps/towers-*. Models have random weights and the sizes in MODELS;
sequences are full. A round runs each case once on each side, ROUNDS times; reports medians. PRECISION is that of the compiled
graph: f32, bf16 or int8.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 11
ROUND_SECONDS = 0.06
CANDIDATES = 1_000
PRECISION = os.environ.get("PRECISION", "f32")


class Gru4Rec(nn.Module):
    """GRU over a history; the last state is the query."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gru, self.query = nn.GRU(width, hidden, batch_first=True), nn.Linear(hidden, width)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        return self.query(self.gru(history)[0][:, -1])


class Block(nn.Module):
    """Transformer layer with post-normalization and an additive mask."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        steps, width = x.shape[1], x.shape[2]
        q, k, v = (part(x).reshape(-1, steps, self.heads, width // self.heads).transpose(1, 2) for part in self.parts[:3])
        logits = q @ k.transpose(2, 3) * (width // self.heads) ** -0.5 + mask
        seen = (logits.softmax(-1) @ v).transpose(1, 2).reshape(-1, steps, width)
        x = self.norms[0](x + self.parts[3](seen))
        return self.norms[1](x + self.down(nn.functional.gelu(self.up(x))))


class Encoder(nn.Module):
    """SASRec if causal, else BERT4Rec: the last position is the query."""

    def __init__(self, steps: int, width: int, heads: int, layers: int, is_causal: bool) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(steps, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width) for _ in range(layers))
        future = torch.triu(torch.full((steps, steps), -1e9), 1) if is_causal else torch.zeros(steps, steps)
        self.register_buffer("future", future)

    def states(self, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = history + self.places
        away = self.future + (1 - mask)[:, None, None, :] * -1e9
        for block in self.blocks:
            x = block(x, away)
        return x

    def forward(self, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.states(history, mask)[:, -1]


class MeanEncoder(Encoder):
    """MiniLM as an encoder of sentences: the query is the mean over all tokens."""

    def forward(self, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        tokens = mask.unsqueeze(-1)
        return (self.states(history, mask) * tokens).sum(1) / tokens.sum(1).clamp(min=1)


class Dcn(nn.Module):
    """DCN-v2: three cross layers of full matrices in parallel to a network."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.deep = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.logit = nn.Linear(width + 128, 1)

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        first = torch.cat([query.unsqueeze(1).expand(-1, item.shape[1], -1), item], -1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return self.logit(torch.cat([x, self.deep(first)], -1))


class Dlrm(nn.Module):
    """DLRM: dot products of all pairs of 16 fields, then a network."""

    def __init__(self, width: int, fields: int = 8) -> None:
        super().__init__()
        self.width = width
        self.fields = fields
        above = [n * 2 * fields + m for n in range(2 * fields) for m in range(n)]
        self.register_buffer("above", torch.tensor(above))
        self.top = nn.Sequential(nn.Linear(len(above) + width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        of_user = query.reshape(-1, 1, self.fields, self.width).expand(-1, item.shape[1], -1, -1)
        all_of = torch.cat([of_user, item.reshape(-1, item.shape[1], self.fields, self.width)], 2)
        products = (all_of @ all_of.transpose(2, 3)).flatten(2)[:, :, self.above]
        return self.top(torch.cat([all_of[:, :, 0], products], -1))


class AutoInt(nn.Module):
    """AutoInt: self-attention over 16 fields."""

    def __init__(self, width: int, fields: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.width, self.fields, self.heads = width, fields, heads
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.logit = nn.Linear(2 * fields * width, 1)

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        count, fields, width = item.shape[1], 2 * self.fields, self.width
        of_user = query.reshape(-1, 1, self.fields, width).expand(-1, count, -1, -1)
        x = torch.cat([of_user, item.reshape(-1, count, self.fields, width)], 2)
        split = lambda y: y.reshape(-1, count, fields, self.heads, width // self.heads).transpose(2, 3)  # noqa: E731
        q, k, v = (split(part(x)) for part in self.parts[:3])
        seen = ((q @ k.transpose(3, 4)).softmax(-1) @ v).transpose(2, 3).reshape(-1, count, fields, width)
        return self.logit((seen + self.parts[3](x)).relu().flatten(2))


class NextItNet(nn.Module):
    """NextItNet: residual blocks of two dilated causal convolutions; the last position is the query."""

    def __init__(self, width: int, dilations: list[int]) -> None:
        super().__init__()
        self.dilations = [d for dilation in dilations for d in (dilation, 2 * dilation)]
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, (1, 3), dilation=(1, d)) for d in self.dilations)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.dilations)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        x = history
        for n, (convolution, norm, dilation) in enumerate(zip(self.convolutions, self.norms, self.dilations, strict=True)):
            before = x if n % 2 == 0 else before
            padded = nn.functional.pad(x.transpose(1, 2).unsqueeze(2), (2 * dilation, 0, 0, 0))
            x = norm(convolution(padded)[:, :, 0].transpose(1, 2)).relu()
            x = x if n % 2 == 0 else x + before
        return x[:, -1]


class Cin(nn.Module):
    """The compressed interaction network of xDeepFM over 16 fields: products of all fields, mixed by a convolution."""

    def __init__(self, width: int, fields: int = 8, sizes: tuple[int, ...] = (100, 100, 100)) -> None:
        super().__init__()
        self.width, self.fields, self.sizes = width, fields, sizes
        heights = [2 * fields, *(size // 2 for size in sizes[:-1])]
        self.mixes = nn.ModuleList(nn.Conv1d(2 * fields * h, size, 1) for h, size in zip(heights, sizes, strict=True))
        self.logit = nn.Linear(sum(size // 2 for size in sizes[:-1]) + sizes[-1], 1)

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        count = item.shape[1]
        of_user = query.reshape(-1, 1, self.fields, self.width).expand(-1, count, -1, -1)
        first = torch.cat([of_user, item.reshape(-1, count, self.fields, self.width)], 2).reshape(-1, 2 * self.fields, self.width)
        last, kept = first, []
        for n, mix in enumerate(self.mixes):
            products = torch.einsum("bmd,bhd->bhmd", first, last).reshape(-1, mix.in_channels, self.width)
            made = mix(products).relu()
            last, own = made.split(self.sizes[n] // 2, 1) if n + 1 < len(self.mixes) else (made, made)
            kept.append(own)
        return self.logit(torch.cat(kept, 1).sum(-1)).reshape(-1, count, 1)


def tower(steps: int, width: int, has_mask: bool) -> dict[str, str]:
    """Returns the inputs of a tower with their shapes; `R` counts rows."""
    return {"history": f"R.{steps}.{width}"} | ({"mask": f"R.{steps}"} if has_mask else {})


def reranker(width: int) -> dict[str, str]:
    return {"query": f"1.{width}", "item": f"1.R.{width}"}


# Model, its inputs, its output, and row counts.
MODELS = {
    "GRU4Rec, 50 steps, hidden 64": (lambda: Gru4Rec(64, 64), tower(50, 64, False), "R.64", [1, 32]),
    "GRU4Rec, 50 steps, hidden 128": (lambda: Gru4Rec(64, 128), tower(50, 64, False), "R.64", [1, 32]),
    "GRU4Rec, 50 steps, hidden 256": (lambda: Gru4Rec(64, 256), tower(50, 64, False), "R.64", [1, 32]),
    "SASRec, 50 steps, 2 layers, 64 wide": (lambda: Encoder(50, 64, 2, 2, True), tower(50, 64, True), "R.64", [1, 32]),
    "BERT4Rec, 200 steps, 4 layers, 256 wide": (lambda: Encoder(200, 256, 4, 4, False), tower(200, 256, True), "R.256", [1]),
    "MiniLM, 256 tokens, 6 layers, 384 wide": (lambda: MeanEncoder(256, 384, 12, 6, False), tower(256, 384, True), "R.384", [1, 32]),
    "DCN-v2, 128 wide": (lambda: Dcn(128), reranker(64), "1.R.1", [CANDIDATES]),
    "DLRM, 16 fields of 16": (lambda: Dlrm(16), reranker(128), "1.R.1", [CANDIDATES]),
    "NextItNet, 50 steps, 64 wide": (lambda: NextItNet(64, [1, 4] * 5), tower(50, 64, False), "R.64", [1, 32]),
    "xDeepFM's CIN, 16 fields of 16": (lambda: Cin(16), reranker(128), "1.R.1", [CANDIDATES]),
    "AutoInt, 16 fields of 16": (lambda: AutoInt(16), reranker(128), "1.R.1", [CANDIDATES]),
}


def sizes(shape: str, rows: int) -> list[int]:
    return [rows if size == "R" else int(size) for size in shape.split(".")]


def export(model: nn.Module, inputs: dict[str, str], path: Path) -> None:
    """Writes the graph of a model, whose row axis is open."""
    args = tuple(torch.randn(*sizes(shape, 3)) for shape in inputs.values())
    axes = {name: {shape.split(".").index("R"): "rows"} for name, shape in inputs.items() if "R" in shape}
    torch.onnx.export(
        model.eval(), args, str(path), dynamo=False, opset_version=17,
        input_names=list(inputs), output_names=["out"], dynamic_axes=axes,
    )  # fmt: skip


class Peer:
    """ONNX Runtime on one thread with preallocated inputs and output."""

    def __init__(self, path: Path, inputs: dict[str, str], rows: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.graph = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.binding = self.graph.io_binding()
        random = np.random.default_rng(7)
        for name, shape in inputs.items():
            values = random.normal(scale=0.3, size=sizes(shape, rows)).astype(np.float32)
            self.binding.bind_cpu_input(name, np.ones_like(values) if name == "mask" else values)
        self.binding.bind_output("out")

    def microseconds(self) -> float:
        """Returns the mean microseconds per run in one round."""
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < ROUND_SECONDS:
            self.graph.run_with_iobinding(self.binding)
            calls += 1
        return (time.perf_counter() - start) / calls * 1e6


class Bench:
    """The bench of this repository, which receives one case at a time."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def microseconds(self, case: str) -> float:
        """Returns the mean microseconds per run in one round."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline().split()[0])


def built() -> Path:
    """Returns the newest build of the bench."""
    found = [p for p in (ROOT / "target/release/deps").glob("towers-*") if os.access(p, os.X_OK) and not p.suffix]
    if not found:
        sys.exit("no bench is built: cargo bench -p sterling-graph --bench towers --no-run")
    return max(found, key=lambda p: p.stat().st_mtime)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(7)
    bench = Bench(Path(sys.argv[1]) if len(sys.argv) > 1 else built())
    print(f"onnxruntime {onnxruntime.__version__}\n")
    print("| model | rows | ONNX Runtime µs | compiled µs | x |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for n, (name, (make, inputs, output, counts)) in enumerate(MODELS.items()):
            if len(sys.argv) > 2 and not any(part in name for part in sys.argv[2:]):
                continue
            path = Path(folder) / f"{n}.onnx"
            export(make(), inputs, path)
            shapes = " ".join(f"{key}={shape}" for key, shape in [*inputs.items(), ("out", output)])
            for rows in counts:
                peer, case = Peer(path, inputs, rows), f"{path} {rows} {PRECISION} {shapes}"
                rounds = [(peer.microseconds(), bench.microseconds(case)) for _ in range(ROUNDS)]
                base, own = (statistics.median(column) for column in zip(*rounds))
                print(f"| {name} | {rows} | {base:.0f} | {own:.0f} | {base / own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
