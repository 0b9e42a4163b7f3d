"""A BERT and its two losses in plain PyTorch, with weights by our names.

Written from the paper (Devlin et al. 2018, arXiv 1810.04805), with torch's own layers; it shares no
line with `shardtrain.models.bert`.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from benchmarks.reference.ddp import Trial

Batch = dict[str, torch.Tensor]


class Layer(nn.Module):
    """Attention, then an MLP; each is added and normalised after."""

    def __init__(self, embed: int, heads: int, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(embed, embed) for _ in range(3))
        self.out = nn.Linear(embed, embed)
        self.attention_norm = nn.LayerNorm(embed, epsilon)
        self.up, self.down = nn.Linear(embed, hidden), nn.Linear(hidden, embed)
        self.mlp_norm = nn.LayerNorm(embed, epsilon)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`seen` [rows, 1, queries, keys] is true where a query may look."""
        rows, length, embed = x.shape
        q, k, v = (
            project(x).view(rows, length, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.attention_norm(x + self.out(mixed.transpose(1, 2).reshape(rows, length, embed)))
        return self.mlp_norm(x + self.down(functional.gelu(self.up(x))))


class Bert(nn.Module):
    """The encoder, both heads, and the sum of both means."""

    def __init__(
        self, *, vocab: int, length: int, embed: int, heads: int, hidden: int, layers: int
    ) -> None:
        super().__init__()
        epsilon = 1e-12
        self.tokens = nn.Embedding(vocab, embed)
        self.positions = nn.Embedding(length, embed)
        self.parts = nn.Embedding(2, embed)
        self.embed_norm = nn.LayerNorm(embed, epsilon)
        self.layers = nn.ModuleList(Layer(embed, heads, hidden, epsilon) for _ in range(layers))
        self.transform = nn.Linear(embed, embed)
        self.transform_norm = nn.LayerNorm(embed, epsilon)
        self.decoder_bias = nn.Parameter(torch.zeros(vocab))
        self.pooler, self.next = nn.Linear(embed, embed), nn.Linear(embed, 2)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' share of the global batch's loss, and of its rows.

        Each term is divided by its own weight in the whole batch, which every row knows.
        """
        tokens = batch["tokens"].long()
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places) + self.parts(batch["parts"].long())
        x = self.embed_norm(x)
        there = batch["segments"]
        seen = (there[:, None, :, None] == there[:, None, None, :]).bool()
        for layer in self.layers:
            x = layer(x, seen)
        at = batch["predicted"].long()[..., None].expand(-1, -1, x.shape[-1])
        h = self.transform_norm(functional.gelu(self.transform(x.gather(1, at))))
        scores = h @ self.tokens.weight.T + self.decoder_bias
        nll = functional.cross_entropy(
            scores.flatten(0, 1), batch["targets"].long().flatten(), reduction="none"
        )
        masked = (nll * batch["weights"].flatten()).sum() / batch["masked_total"][0]
        following = self.next(torch.tanh(self.pooler(x[:, 0])))
        nll = functional.cross_entropy(following, batch["next"].long(), reduction="none")
        pairs = (nll * batch["next_weights"]).sum() / batch["next_total"][0]
        return masked + pairs, (1.0 / batch["row_total"]).sum()


def make(trial: "Trial") -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with our initial weights, and plain SGD."""
    settings = trial.settings
    sizes = ("vocab", "length", "embed", "heads", "hidden", "layers")
    model = Bert(**{name: settings[name] for name in sizes})
    ours = {path: torch.from_numpy(leaf) for path, leaf in trial.weights.items()}
    with torch.no_grad():
        model.tokens.weight.copy_(ours["embedding"][: settings["vocab"]])
        model.positions.weight.copy_(ours["positions"])
        model.parts.weight.copy_(ours["segments"])
        model.decoder_bias.copy_(ours["decoder_bias"][: settings["vocab"]])
        _norm(model.embed_norm, ours, "embed_norm")
        _norm(model.transform_norm, ours, "transform_norm")
        _linear(model.transform, ours["transform"], ours["transform_bias"])
        _linear(model.pooler, ours["next/pooler"], ours["next/pooler_bias"])
        _linear(model.next, ours["next/kernel"], ours["next/bias"])
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            _layer(layer, {path: leaf[index] for path, leaf in ours.items() if "layers/" in path})
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def _layer(layer: Layer, ours: dict[str, torch.Tensor]) -> None:
    embed = layer.out.out_features
    qkv, bias = ours["layers/attention/qkv"], ours["layers/attention/qkv_bias"]
    for index, linear in enumerate((layer.query, layer.key, layer.value)):
        _linear(linear, qkv[:, :, index].reshape(embed, embed), bias[:, index].reshape(embed))
    _linear(
        layer.out,
        ours["layers/attention/out"].reshape(embed, embed),
        ours["layers/attention/out_bias"],
    )
    _norm(layer.attention_norm, ours, "layers/attention_norm")
    _linear(layer.up, ours["layers/mlp/up"], ours["layers/mlp/up_bias"])
    _linear(layer.down, ours["layers/mlp/down"].T, ours["layers/mlp/down_bias"])
    _norm(layer.mlp_norm, ours, "layers/mlp_norm")


def _linear(linear: nn.Linear, kernel: torch.Tensor, bias: torch.Tensor) -> None:
    """From a kernel [in, out]."""
    linear.weight.copy_(kernel.T)
    linear.bias.copy_(bias)


def _norm(norm: nn.LayerNorm, ours: dict[str, torch.Tensor], path: str) -> None:
    norm.weight.copy_(ours[f"{path}/scale"])
    norm.bias.copy_(ours[f"{path}/bias"])
