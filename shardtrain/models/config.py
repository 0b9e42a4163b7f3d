"""The `[model]` section.

Owns: the keys of each model type, their types and defaults, and the sizes that follow from them.
Does not own: checks against other sections, nor the models.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

GATED = ("swiglu", "geglu")
"""Activations whose MLP has two halves, one of which gates the other."""

_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


class LoraConfig(BaseModel):
    """Train a change of low rank and leave the model's own weights as they are."""

    model_config = _SECTION

    rank: int = Field(0, ge=0)
    """Inner width of the change (LoRA, arXiv 2106.09685). 0 = all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """The change is alpha / rank times the product of its two matrices."""
    targets: str = "qkv,out"
    """Matrices of a layer that are changed, comma-separated: qkv and out of the attention, up and
    down of the MLP."""


class TransformerConfig(BaseModel):
    """A decoder-only transformer: GPT, Llama and BLOOM are choices of these keys."""

    model_config = _SECTION

    type: Literal["transformer"] = "transformer"
    """Which model this is."""
    num_layers: int = Field(ge=1)
    """Blocks."""
    embed_dim: int = Field(ge=1)
    """Width of the residual stream."""
    num_heads: int = Field(ge=1)
    """Query heads."""
    num_kv_heads: int = Field(0, ge=0)
    """Key and value heads, each shared by a group of query heads. 0 = as many as query heads."""
    head_dim: int = Field(0, ge=0)
    """Width of one head. 0 = embed_dim / num_heads."""
    mlp_dim: int = Field(0, ge=0)
    """Width inside the MLP. 0 = 4 x embed_dim."""
    vocab_size: int = Field(0, ge=0)
    """Tokens. 0 = as many as the tokenizer has."""
    vocab_multiple: int = Field(1, ge=1)
    """Embedding rows are padded to a multiple of this; padding never gets probability."""
    max_length: int = Field(0, ge=0)
    """Rows of the learned position table, in tokens. 0 = data.sequence_length."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each half of a block and before the head."""
    norm_bias: bool = True
    """Whether a layernorm has a bias. rmsnorm never has one."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Added to the variance, or to the mean square of rmsnorm, before its root is taken."""
    position: Literal["learned", "rope", "alibi", "none"] = "learned"
    """How a token knows its place: a learned table, rotations, or a slope on the scores."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotation wavelengths (position = "rope")."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Slower rotations for longer texts: linear = all of them; llama3 = those whose wavelength is
    long beside rope_trained_length, as in Llama 3.1."""
    rope_factor: float = Field(8.0, gt=0)
    """How many times slower (rope_scaling = "linear" or "llama3")."""
    rope_trained_length: int = Field(8192, ge=1)
    """Tokens of the sequences before they were made longer (rope_scaling = "llama3")."""
    rope_low: float = Field(1.0, gt=0)
    """Rotations that turn less often than this within rope_trained_length are slowed in full."""
    rope_high: float = Field(4.0, gt=0)
    """Those that turn more often than this are left alone; between the two, in part."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP; swiglu and geglu have a third matrix, the gate."""
    bias: bool = True
    """Whether the linear maps have biases."""
    tied: bool = True
    """Whether the output matrix is the embedding."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Fraction of activations dropped after the embedding and each half of a block."""
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Fraction of attention weights dropped; not with attention = "cudnn"."""
    embed_norm: bool = False
    """A normalisation right after the embedding, as BLOOM has it."""
    attention: Literal["auto", "xla", "cudnn", "ring", "ulysses"] = "auto"
    """Attention kernel. auto = XLA, and with mesh.context above 1 ring; cudnn = the fused one, for
    16-bit types on NVIDIA GPUs; ring and ulysses = tile by tile, over mesh.context."""
    layer_loop: Literal["auto", "scan", "unroll"] = "auto"
    """Layers as a loop or written out. auto = written out on CPU below 16 layers, else a loop."""

    @property
    def drops(self) -> bool:
        """Whether anything is dropped in training."""
        return self.dropout > 0 or self.attention_dropout > 0

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of one head, with the default resolved."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width inside the MLP, with the default resolved."""
        return self.mlp_dim or 4 * self.embed_dim

    def padded_vocab(self, vocab_size: int) -> int:
        """Return the rows of the embedding for that many tokens.

        Args:
            vocab_size: Tokens that the data or the tokenizer has; `model.vocab_size` goes first.

        Returns:
            The rows, a multiple of `vocab_multiple`.
        """
        size = self.vocab_size or vocab_size
        return -(-size // self.vocab_multiple) * self.vocab_multiple


class BertConfig(BaseModel):
    """BERT: an encoder that reads both ways, with heads for hidden tokens and next sentences."""

    model_config = _SECTION

    type: Literal["bert"] = "bert"
    """Which model this is (Devlin et al. 2018, arXiv 1810.04805)."""
    num_layers: int = Field(ge=1)
    """Blocks."""
    embed_dim: int = Field(ge=1)
    """Width of the residual stream."""
    num_heads: int = Field(ge=1)
    """Attention heads, each embed_dim / num_heads wide."""
    mlp_dim: int = Field(0, ge=0)
    """Width inside the MLP. 0 = 4 x embed_dim."""
    vocab_size: int = Field(0, ge=0)
    """Tokens. 0 = as many as the tokenizer has."""
    vocab_multiple: int = Field(1, ge=1)
    """Embedding rows are padded to a multiple of this; padding never gets probability."""
    max_length: int = Field(512, ge=1)
    """Rows of the position table, in tokens: those of the longest phase of a training."""
    next_sentence: bool = True
    """Whether to learn if the second part of a sample follows the first. False = no pairs, no head
    for it, and samples that are full of text (RoBERTa, arXiv 1907.11692)."""
    norm_epsilon: float = Field(1e-12, gt=0)
    """Added to the variance before its root is taken."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Activation of the MLP and of the head for hidden tokens."""
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Fraction of activations dropped after the embedding and each half of a block."""
    attention_dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Fraction of attention weights dropped; not with attention = "cudnn"."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel. auto = XLA; cudnn = the fused one, for 16-bit types on NVIDIA GPUs."""
    layer_loop: Literal["auto", "scan", "unroll"] = "auto"
    """Layers as a loop or written out. auto = written out on CPU below 16 layers, else a loop."""

    @property
    def as_transformer(self) -> TransformerConfig:
        """The stack in the words of a transformer, whose parts it is made of."""
        return TransformerConfig(
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            vocab_size=self.vocab_size,
            vocab_multiple=self.vocab_multiple,
            max_length=self.max_length,
            norm_epsilon=self.norm_epsilon,
            activation=self.activation,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            attention=self.attention,
            layer_loop=self.layer_loop,
        )


class ResNetConfig(BaseModel):
    """A residual network for images (He et al. 2015, arXiv 1512.03385; its version 1.5)."""

    model_config = _SECTION

    type: Literal["resnet"] = "resnet"
    """Which model this is."""
    depth: Literal[10, 18, 34, 50, 101] = 50
    """Layers with weights; 10 has one block a stage, for small trials. From 50 on blocks are
    bottlenecks, which stride in their 3 x 3 convolution (version 1.5)."""
    width: int = Field(64, ge=1)
    """Channels of the first stage; each later one has twice as many."""
    stem: Literal["large", "small"] = "large"
    """large = 7 x 7 with stride 2 and a max-pool, for images of some 224 pixels; small = 3 x 3
    alone, for those of some 32 or fewer."""
    num_classes: int = Field(0, ge=0)
    """Classes. 0 = as many as the data has."""
    norm_statistics: Literal["global", "microbatch", "per_replica"] = "global"
    """What batch norm takes mean and variance of: global = the whole batch; microbatch = each
    microbatch, over all devices; per_replica = each device's own samples, as
    DistributedDataParallel does, so that other meshes are other runs."""
    norm_momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Part of the running statistics that a step leaves as it is; they are what evaluation uses."""
    norm_epsilon: float = Field(1e-5, gt=0.0)
    """Added to the variance before its root is taken."""


class TablesConfig(BaseModel):
    """Embedding tables, a table for each field of a sample."""

    model_config = _SECTION

    table_sizes: list[int] = Field(min_length=1)
    """Rows of each field's table: its ids are below that."""
    num_dense: int = Field(1, ge=0)
    """Numbers of a sample that are no ids."""
    embed_dim: int = Field(16, ge=1)
    """Width of all tables."""
    placement: Literal["auto", "rows", "columns", "tables"] = "auto"
    """How tables that are not small are split over all devices: by rows, by columns, or whole
    tables. auto = by size, table by table; `plan` and the start of a run say how."""
    dense_rows: int = Field(2048, ge=0)
    """Tables of at most so many rows are whole on every device, and trained like all other
    parameters, by `[optimizer]`."""
    table_parts: int = Field(8, ge=1)
    """Parts of tables that are split; a multiple of the devices. The same for all meshes that a
    checkpoint should fit."""
    table_optimizer: Literal["rowwise_adagrad", "sgd"] = "rowwise_adagrad"
    """What moves the rows that a batch has used: Adagrad with one number a row, or sgd."""
    table_rate: float = Field(1.0, gt=0.0)
    """Learning rate of split tables as a multiple of that of the optimizer."""
    table_epsilon: float = Field(1e-8, gt=0.0)
    """Added to the root of a row's sum of squares."""
    freeze_tables: bool = False
    """Whether no table is trained, for fine-tuning the rest of a model from `run.init`."""

    @field_validator("table_sizes")
    @classmethod
    def _counts(cls, value: list[int]) -> list[int]:
        if any(not 1 <= size < 2**31 for size in value):
            raise ValueError("must be numbers of rows, from 1 to 2147483647")
        return value


class DlrmConfig(TablesConfig):
    """A deep learning recommendation model (Naumov et al. 2019, arXiv 1906.00091)."""

    type: Literal["dlrm"] = "dlrm"
    """Which model this is."""
    num_dense: int = Field(1, ge=1)
    """Numbers of a sample that are no ids; they go through the bottom."""
    bottom: list[int] = [64, 32]
    """Widths of the layers below the pairs; a last one, of the tables' width, is added."""
    top: list[int] = [64, 32]
    """Widths of the layers above them; a last one, of width 1, is added."""


class TwoTowerConfig(TablesConfig):
    """Vectors of users and of items, for retrieval: the last field is the item."""

    type: Literal["two_tower"] = "two_tower"
    """Which model this is."""
    num_dense: int = Field(0, ge=0)
    """Numbers of a sample that are no ids; they belong to the user and the moment."""
    tower: list[int] = Field([64, 32], min_length=1)
    """Widths of the layers of both towers; the last is that of the vectors."""
