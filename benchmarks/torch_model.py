"""The model in plain torch.nn, as torch users write it; shared by torch_step.py and torch_ranks.py.

Differs from the others in nothing that costs time: GELU is the exact one, PyTorch's default.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import common
from benchmarks.common import Ids, Size


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        embed = size.embed
        self.heads = size.heads
        self.norm1, self.norm2 = (nn.LayerNorm(embed, bias=False) for _ in range(2))
        self.qkv = nn.Linear(embed, 3 * embed, bias=False)
        self.out = nn.Linear(embed, embed, bias=False)
        self.up = nn.Linear(embed, 4 * embed, bias=False)
        self.down = nn.Linear(4 * embed, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the layer."""
        batch, length, embed = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, embed // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(embed, dim=-1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).reshape(batch, length, embed))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Embedding, blocks, tied head and loss."""

    numbers: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.embed)
        self.positions = nn.Embedding(size.length, size.embed)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.embed, bias=False)
        self.register_buffer("numbers", torch.arange(size.length), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=size.residual if into_residual else common.STDDEV)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean negative log-likelihood."""
        h = self.tokens(x) + self.positions(self.numbers[: x.shape[1]])
        for block in self.blocks:
            h = block(h)
        logits = functional.linear(self.norm(h), self.tokens.weight)
        return functional.cross_entropy(logits.float().view(-1, logits.size(-1)), y.reshape(-1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in its fused kernel, decay on matrices only."""
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": common.DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=common.LEARNING_RATE,
        betas=(common.BETA1, common.BETA2),
        eps=common.EPSILON,
        fused=True,
    )


def tensors(batches: list[tuple[Ids, Ids]], rank: int = 0, ranks: int = 1) -> list[list[Tensor]]:
    """The rows of one rank."""
    return [
        [torch.from_numpy(array[rank::ranks].copy()).long() for array in batch] for batch in batches
    ]
