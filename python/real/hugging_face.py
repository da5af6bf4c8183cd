"""User towers around models of transformers, built from a configuration: they read the rows of a history as ``inputs_embeds``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, LENGTH = 64, 50


def model(kind: str) -> nn.Module:
    """Returns a model of transformers without weights of a hub."""
    import transformers as t

    if kind == "BERT":
        config: Any = t.BertConfig(vocab_size=2, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, max_position_embeddings=LENGTH)
        return t.BertModel(config, add_pooling_layer=False)
    if kind == "GPT-2":
        return t.GPT2Model(t.GPT2Config(vocab_size=2, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4))
    return t.LlamaModel(
        t.LlamaConfig(vocab_size=2, hidden_size=WIDTH, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH)
    )


class Tower(nn.Module):
    """The state at the last value, or of BERT the mean of all states."""

    def __init__(self, kind: str):
        super().__init__()
        self.model, self.is_causal = model(kind), kind != "BERT"

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        options = {"use_cache": False} if self.is_causal else {}
        states = self.model(inputs_embeds=history, attention_mask=history_mask, **options).last_hidden_state
        if not self.is_causal:
            return (states * history_mask.unsqueeze(-1)).sum(1) / history_mask.sum(1, keepdim=True).clamp(min=1)
        last = (history_mask.sum(1).long() - 1).clamp(min=0)
        return states[torch.arange(states.shape[0]), last]
