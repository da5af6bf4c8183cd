"""Small user towers, one function or module of PyTorch each, over a history ``x`` ``[Q, 6, 8]`` and its mask ``m`` ``[Q, 6]``.

``CASES`` are exported, published and served by ``scripts/real_models.py --cases``; ``tests/test_cases.py`` exports some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sterling import Ids
from torch import nn

S, W = 6, 8


class Tower(nn.Module):
    """Computes a query from ``x`` and ``m``; ``parts`` are its modules and parameters."""

    def __init__(self, compute: Callable[..., torch.Tensor], parts: dict[str, Any]):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        # The second term reads the mask, so that it is an input of every exported graph.
        return self.compute(self, history, history_mask) + 0.125 * history_mask.sum(1, keepdim=True)


@dataclass(frozen=True)
class Case:
    """A named tower; ``parts`` is called with a seed, so that every build has the same weights."""

    name: str
    compute: Callable[..., torch.Tensor]
    parts: Callable[[], dict[str, Any]]

    def tower(self) -> Tower:
        torch.manual_seed(len(self.name))
        return Tower(self.compute, self.parts()).eval()

    def build(self) -> dict[str, Any]:
        """Returns the arguments of `sterling.export`."""
        table = torch.randn(40, W, generator=torch.Generator().manual_seed(1))
        items = [{"id": n, "embedding": row} for n, row in enumerate(table.tolist())]
        return dict(user=self.tower(), tables={"t": table}, features={"user": [Ids("history", "t", "none", length=S)]}, items=items)


CASES: list[Case] = []


def case(name: str, compute: Callable[..., torch.Tensor], **parts: Callable[[], Any]) -> None:
    CASES.append(Case(name, compute, lambda: {key: make() for key, make in parts.items()}))


def linear(a: int = W, b: int = W) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(a, b)


def randn(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape) * 0.5


def total(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x * m.unsqueeze(-1)).sum(1)


def length(m: torch.Tensor) -> torch.Tensor:
    return m.sum(1).long()


def pooled(compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Applies a function to the sum of a history, ``[Q, 8]``."""
    return lambda s, x, m: compute(total(x, m))


def each(compute: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Applies a function to the rows ``[Q, 6, 8]``, and sums those that are there."""
    return lambda s, x, m: total(compute(x), m)


# Functions of each number.
for name in ("relu", "gelu", "silu", "selu", "celu", "elu", "mish", "softplus", "softsign", "tanhshrink", "hardswish", "hardsigmoid", "hardtanh", "relu6",
             "logsigmoid", "leaky_relu", "softshrink", "hardshrink"):  # fmt: skip
    case(f"F.{name}", pooled(getattr(F, name)))
for name in ("exp", "sin", "cos", "tan", "atan", "asinh", "sinh", "cosh", "erf", "expm1", "sigmoid", "tanh", "abs", "neg", "sign", "floor", "ceil", "round", "trunc", "frac",
             "square", "sigmoid"):  # fmt: skip
    case(f"torch.{name}" if name not in {c.name.removeprefix("torch.") for c in CASES} else f"Tensor.{name}", pooled(lambda x, name=name: getattr(torch, name)(x * 0.5)))
for name in ("log", "sqrt", "rsqrt", "log2", "log1p", "reciprocal"):
    case(f"torch.{name}", pooled(lambda x, name=name: getattr(torch, name)(x.abs() + 0.5)))
case("gelu tanh", pooled(lambda x: F.gelu(x, approximate="tanh")))
case("pow", pooled(lambda x: torch.pow(x.abs() + 0.1, 1.7)))
case("pow of a base", pooled(lambda x: torch.pow(2.0, x)))
case("remainder", pooled(lambda x: torch.remainder(x, 0.7)))
case("fmod", pooled(lambda x: torch.fmod(x, 0.3)))
case("clamp", pooled(lambda x: x.clamp(-0.5, 0.5)))
case("lerp", pooled(lambda x: torch.lerp(x, x * x, 0.3)))
case("where", pooled(lambda x: torch.where(x > 0, x, x * 0.1)))
case("masked_fill", pooled(lambda x: x.masked_fill(x > 1, 0.0)))
case("maximum", pooled(lambda x: torch.maximum(x, x.flip(-1))))
case("nan_to_num", pooled(lambda x: torch.nan_to_num(x)))
case("logical", pooled(lambda x: ((x > 0) & (x < 1) | ~(x > -1)).float()))
case("int cast", pooled(lambda x: (x * 10).int().float()))
case("double", pooled(lambda x: (x.double() * 1.5).float()))
case("half", pooled(lambda x: (x.half() * 1.5).float()))
case("bfloat16", pooled(lambda x: (x.bfloat16() * 1.5).float()))
# Reductions.
for name in ("amax", "amin", "mean", "prod", "logsumexp", "var", "std"):
    case(f"{name} of rows", each(lambda x, name=name: x + getattr(torch, name)(x, -1, keepdim=True)))
case("max with index", pooled(lambda x: x.max(-1, keepdim=True)[0] + x))
case("argmax one-hot", pooled(lambda x: F.one_hot(x.argmax(-1), W).float() + x))
case("norm", pooled(lambda x: x * x.norm(dim=-1, keepdim=True)))
case("normalize", pooled(lambda x: F.normalize(x, dim=-1)))
case("cosine_similarity", lambda s, x, m: F.cosine_similarity(total(x, m), s.a, dim=-1).unsqueeze(-1) * s.a, a=randn(1, W))
case("cumsum of numbers", pooled(lambda x: torch.cumsum(x, -1)))
case("cumsum of a mask", lambda s, x, m: (x * torch.cumsum(m, 1).unsqueeze(-1)).sum(1))
case("cumprod", pooled(lambda x: torch.cumprod(x * 0.5, -1)))
case("softmax", each(lambda x: torch.softmax(x, -1)))
case("log_softmax", each(lambda x: torch.log_softmax(x, -1)))
case("softmax along the sequence", each(lambda x: torch.softmax(x, 1)))
case("topk values", pooled(lambda x: torch.topk(x, 3, -1)[0].sum(-1, keepdim=True) + x))
case("topk of a sequence", lambda s, x, m: torch.topk(x.sum(-1), 3, 1)[0].sum(1, keepdim=True) + total(x, m))
case("sort", pooled(lambda x: torch.sort(x, -1)[0]))
# Movements.
case("flip", each(lambda x: torch.flip(x, [1])))
case("roll", pooled(lambda x: torch.roll(x, 2, -1)))
case("pad", lambda s, x, m: total(x, m - F.pad(m[:, 1:], (0, 1))))
case("pad constant", pooled(lambda x: F.pad(x, (1, 1), value=0.5)[:, :W]))
case("pad reflect", pooled(lambda x: F.pad(x.unsqueeze(1), (1, 1), mode="reflect").squeeze(1)[:, :W]))
case("slice step", pooled(lambda x: torch.cat([x[:, ::2], x[:, 1::2]], -1)))
case("chunk", pooled(lambda x: torch.cat(torch.chunk(x, 2, -1)[::-1], -1)))
case("split", pooled(lambda x: torch.cat(torch.split(x, [3, 5], -1)[::-1], -1)))
case("stack and unbind", pooled(lambda x: torch.stack(x.unbind(-1)[::-1], -1)))
case("repeat_interleave", pooled(lambda x: x.repeat_interleave(2, -1)[:, ::2]))
case("repeat", pooled(lambda x: x.repeat(1, 2)[:, 4:12]))
case("tile and expand", lambda s, x, m: (x * m.unsqueeze(-1).expand_as(x)).sum(1))
case("permute", each(lambda x: x.permute(0, 2, 1).reshape(-1, S, W)))
case("unfold", each(lambda x: x.unfold(1, 3, 1).mean(-1).repeat(1, 2, 1)[:, :S]))
case("index by a constant", pooled(lambda x: x[:, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])]))
case("index_select", pooled(lambda x: x.index_select(1, torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))))
case("index of two axes", lambda s, x, m: (x @ x.transpose(1, 2))[:, torch.triu_indices(S, S, 1)[0], torch.triu_indices(S, S, 1)[1]][:, :W] * m.mean(1, keepdim=True))
case("tril", each(lambda x: torch.tril(x)))
case("diagonal", each(lambda x: x * torch.diagonal(x @ x.transpose(1, 2), dim1=1, dim2=2).unsqueeze(-1)))
case("scatter", pooled(lambda x: torch.zeros_like(x).scatter(1, torch.tensor([[0, 2, 4, 6]]).expand(x.shape[0], 4), x[:, :4])))
case("index_fill", pooled(lambda x: torch.index_fill(x, 1, torch.tensor([0, 3]), 2.0)))
case("bucketize", pooled(lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])).float()))
# Returns the hidden states of a sequence.
case("last by gather", lambda s, x, m: x.gather(1, (length(m) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, W)).squeeze(1))
case("last by index", lambda s, x, m: x[torch.arange(x.shape[0]), (length(m) - 1).clamp(min=0)])
case("last by one-hot", lambda s, x, m: total(x, F.one_hot((length(m) - 1).clamp(min=0), S).float()))
case("last by argmax", lambda s, x, m: x[torch.arange(x.shape[0]), (m * torch.arange(1, S + 1)).argmax(1)])
case("last by a shifted mask", lambda s, x, m: total(x, m - torch.cat([m[:, 1:], torch.zeros_like(m[:, :1])], 1)))
case("take_along_dim", lambda s, x, m: torch.take_along_dim(x, (length(m) - 1).clamp(min=0).view(-1, 1, 1), 1).squeeze(1))
case("first", lambda s, x, m: x[:, 0])
case("masked mean", lambda s, x, m: total(x, m) / m.sum(1, keepdim=True).clamp(min=1))
case("masked max", lambda s, x, m: x.masked_fill(m.unsqueeze(-1) < 0.5, -1e4).amax(1) * m.amax(1, keepdim=True))
case("positions by length", lambda s, x, m: total(x + s.p[(length(m).unsqueeze(1) - torch.arange(S)).clamp(min=0)], m), p=randn(S + 1, W))
case("positions by cumsum", lambda s, x, m: total(x * s.p[torch.cumsum(m, 1).long().clamp(max=S)], m), p=randn(S + 1, W))
case("positions by an embedding", lambda s, x, m: total(x + s.p(torch.arange(x.shape[1])), m), p=lambda: nn.Embedding(S, W))
case("relative positions", lambda s, x, m: total((x @ x.transpose(1, 2) + s.p[torch.arange(S)[:, None] - torch.arange(S)[None, :] + S]) @ x, m), p=randn(2 * S))
# Products.
case("einsum of two", lambda s, x, m: torch.einsum("bsd,bs->bd", x, m))
case("einsum of three", lambda s, x, m: torch.einsum("bi,ij,jk->bk", total(x, m), s.a, s.b), a=randn(W, W), b=randn(W, W))
case("einsum with an ellipsis", lambda s, x, m: torch.einsum("...sd,...s->...d", x, m))
case("einsum of a diagonal", lambda s, x, m: torch.einsum("bii->bi", total(x, m).unsqueeze(-1) * s.a), a=randn(W))
case("bilinear", lambda s, x, m: s.b(total(x, m), total(x, m)), b=lambda: nn.Bilinear(W, W, W))
case("baddbmm", lambda s, x, m: total(torch.baddbmm(x, x @ x.transpose(1, 2), x, beta=0.5, alpha=0.25), m))
case("outer product", lambda s, x, m: s.l((total(x, m).unsqueeze(2) * total(x, m).unsqueeze(1)).flatten(1)), l=linear(W * W))
case("constant matrix times columns", lambda s, x, m: (s.w @ total(x, m).unsqueeze(2)).squeeze(2), w=randn(W, W))
case("addmm", lambda s, x, m: torch.addmm(s.b, total(x, m), s.w), b=randn(W), w=randn(W, W))
# Norms and layers.
case("LayerNorm", lambda s, x, m: total(s.n(x), m), n=lambda: nn.LayerNorm(W))
case("RMSNorm", lambda s, x, m: total(s.n(x), m), n=lambda: nn.RMSNorm(W))
case("rms by hand", each(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
case("BatchNorm1d", lambda s, x, m: s.n(total(x, m)), n=lambda: nn.BatchNorm1d(W))
case("GroupNorm", lambda s, x, m: s.n(total(x, m)), n=lambda: nn.GroupNorm(2, W))
case("InstanceNorm1d", lambda s, x, m: total(s.n(x.transpose(1, 2)).transpose(1, 2), m), n=lambda: nn.InstanceNorm1d(W))
case("PReLU", lambda s, x, m: s.a(total(x, m)), a=lambda: nn.PReLU(W))
case("weight_norm", lambda s, x, m: s.l(total(x, m)), l=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(W, W)))
case("GLU", lambda s, x, m: F.glu(s.l(total(x, m))), l=linear(W, 2 * W))
case("SwiGLU", lambda s, x, m: s.c(F.silu(s.a(total(x, m))) * s.b(total(x, m))), a=linear(W, 16), b=linear(W, 16), c=linear(16))
case("mixture of experts", lambda s, x, m: (torch.softmax(s.g(total(x, m)), -1).unsqueeze(2) * s.e(total(x, m)).reshape(-1, 4, W)).sum(1), g=linear(W, 4), e=linear(W, 4 * W))
case("FiLM", lambda s, x, m: total(x * s.a(total(x, m)).unsqueeze(1) + s.b(total(x, m)).unsqueeze(1), m), a=linear(), b=linear())
case("squeeze and excitation", lambda s, x, m: total(x * torch.sigmoid(s.l(x.mean(2))).unsqueeze(2), m), l=linear(S, S))
# Convolutions and pools.
case("Conv1d", lambda s, x, m: total(s.c(x.transpose(1, 2)).transpose(1, 2), m), c=lambda: nn.Conv1d(W, W, 3, padding=1))
case("Conv1d causal dilated", lambda s, x, m: total(s.c(F.pad(x.transpose(1, 2), (4, 0))).transpose(1, 2), m), c=lambda: nn.Conv1d(W, W, 3, dilation=2))
case("Conv1d depthwise", lambda s, x, m: total(s.c(x.transpose(1, 2)).transpose(1, 2), m), c=lambda: nn.Conv1d(W, W, 3, padding=1, groups=W))
case("Conv1d of kernel 1", lambda s, x, m: total(s.c(x.transpose(1, 2)).transpose(1, 2), m), c=lambda: nn.Conv1d(W, W, 1))
case("Conv2d", lambda s, x, m: s.c(x.unsqueeze(1)).amax(2).squeeze(-1), c=lambda: nn.Conv2d(1, W, (3, W)))
case("max_pool1d", each(lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)))
case("avg_pool1d", each(lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)))
case("adaptive_avg_pool1d", lambda s, x, m: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(2))
# Recurrent layers.
case("GRU", lambda s, x, m: s.r(x * m.unsqueeze(-1))[0][:, -1], r=lambda: nn.GRU(W, W, batch_first=True))
case("GRU bidirectional", lambda s, x, m: s.l(s.r(x)[0][:, 0]), r=lambda: nn.GRU(W, W, batch_first=True, bidirectional=True), l=linear(2 * W))
case("GRU of two layers", lambda s, x, m: s.r(x)[1][-1], r=lambda: nn.GRU(W, W, num_layers=2, batch_first=True))
case("GRU, last state", lambda s, x, m: s.r(x)[0][torch.arange(x.shape[0]), (length(m) - 1).clamp(min=0)], r=lambda: nn.GRU(W, W, batch_first=True))
case("LSTM", lambda s, x, m: total(s.r(x)[0], m), r=lambda: nn.LSTM(W, W, batch_first=True))
case("LSTM bidirectional", lambda s, x, m: s.l(total(s.r(x)[0], m)), r=lambda: nn.LSTM(W, W, batch_first=True, bidirectional=True), l=linear(2 * W))
case("LSTM, cell", lambda s, x, m: s.r(x)[1][1][-1], r=lambda: nn.LSTM(W, W, batch_first=True))
case("RNN", lambda s, x, m: s.r(x)[0][:, -1], r=lambda: nn.RNN(W, W, batch_first=True))


# Attention.
def heads(x: torch.Tensor, count: int = 2) -> torch.Tensor:
    return x.reshape(x.shape[0], S, count, -1).transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], S, -1)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of halves by the position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    return torch.cat([x[..., :half] * angle.cos() - x[..., half:] * angle.sin(), x[..., half:] * angle.cos() + x[..., :half] * angle.sin()], -1)


def attention() -> nn.Module:
    return nn.MultiheadAttention(W, 2, batch_first=True)


def encoder(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(W, 2, 16, batch_first=True, dropout=0.0, **options)


CAUSAL = torch.triu(torch.full((S, S), float("-inf")), 1)
sdpa = F.scaled_dot_product_attention
case("sdpa", each(lambda x: sdpa(x, x, x)))
case("sdpa causal", each(lambda x: sdpa(x, x, x, is_causal=True)))
case("sdpa, boolean mask", lambda s, x, m: total(sdpa(x, x, x, attn_mask=(m > 0.5).unsqueeze(1).expand(-1, S, -1)), m))
case("sdpa, mask of -inf", lambda s, x, m: total(sdpa(x, x, x, attn_mask=torch.where(m > 0.5, 0.0, float("-inf")).unsqueeze(1)), m))
case("sdpa, grouped queries", lambda s, x, m: total(merged(sdpa(heads(s.q(x), 4), heads(s.k(x), 2), heads(s.k(x), 2), enable_gqa=True)), m), q=linear(), k=linear(W, 4))
case("grouped queries by repeat", lambda s, x, m: total(merged(sdpa(heads(s.q(x), 4), heads(s.k(x), 2).repeat_interleave(2, 1), heads(s.k(x), 2).repeat_interleave(2, 1))), m),
     q=linear(), k=linear(W, 4))  # fmt: skip
case("rotary attention", lambda s, x, m: total(merged(sdpa(rotary(heads(x)), rotary(heads(x)), heads(x), is_causal=True)), m))
case("softmax under -1e9", lambda s, x, m: total(torch.softmax(x @ x.transpose(1, 2) + (m.unsqueeze(1) - 1) * 1e9, -1) @ x, m))
case("softmax under the least number", lambda s, x, m: total(torch.softmax((x @ x.transpose(1, 2)).masked_fill(m.unsqueeze(1) < 0.5, torch.finfo(x.dtype).min), -1) @ x, m))
case("softmax under -inf", lambda s, x, m: total(torch.softmax((x @ x.transpose(1, 2)).masked_fill(m.unsqueeze(1) < 0.5, float("-inf")), -1) @ x, m))
case("attention pooling", lambda s, x, m: total(x, torch.softmax(s.l(x).squeeze(-1).masked_fill(m < 0.5, float("-inf")), 1)), l=linear(W, 1))
case("pointwise attention (HSTU)", lambda s, x, m: total(F.silu(x @ x.transpose(1, 2)) * m.unsqueeze(1) / S @ x, m))
case("MultiheadAttention", lambda s, x, m: total(s.a(x, x, x, need_weights=False)[0], m), a=attention)
case("MultiheadAttention, padding mask", lambda s, x, m: total(s.a(x, x, x, key_padding_mask=m < 0.5, need_weights=False)[0], m), a=attention)
case("MultiheadAttention with weights", lambda s, x, m: total(s.a(x, x, x, key_padding_mask=m < 0.5)[0], m), a=attention)
case("MultiheadAttention, causal", lambda s, x, m: total(s.a(x, x, x, attn_mask=CAUSAL, need_weights=False)[0], m), a=attention)
case("cross attention", lambda s, x, m: s.a(total(x, m).unsqueeze(1), x, x, key_padding_mask=m < 0.5, need_weights=False)[0].squeeze(1), a=attention)
case("TransformerEncoderLayer", lambda s, x, m: total(s.e(x, src_key_padding_mask=m < 0.5), m), e=encoder())
case("TransformerEncoderLayer, norm first", lambda s, x, m: total(s.e(x), m), e=encoder(activation="gelu", norm_first=True))
case("TransformerEncoderLayer, causal", lambda s, x, m: total(s.e(x, src_mask=CAUSAL, is_causal=True), m), e=encoder())
case("TransformerEncoder", lambda s, x, m: total(s.e(x, src_key_padding_mask=m < 0.5), m), e=lambda: nn.TransformerEncoder(encoder()(), 2))
case("TransformerDecoderLayer", lambda s, x, m: s.d(total(x, m).unsqueeze(1), x, memory_key_padding_mask=m < 0.5).squeeze(1),
     d=lambda: nn.TransformerDecoderLayer(W, 2, 16, batch_first=True, dropout=0.0))  # fmt: skip
