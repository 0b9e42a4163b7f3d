"""The `[data]` section.

Owns: the keys, their types and their defaults. Does not own: reading, tokenizers, the cache.
"""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


LEARNED: Final = "wordpiece:"
"""Before a number of tokens in `data.tokenizer`: WordPieces that are learned from the text."""


class DataConfig(BaseModel):
    """What is learned from, and in what portions."""

    model_config = _SECTION

    type: Literal["text"] = "text"
    """Which data this is."""
    path: str = ""
    """Text file, folder of text, JSONL of text or of prompts and completions, Parquet, MosaicML's
    MDS, ArrayRecord, a prepared folder, or tokens as .npy, MDS or Megatron-LM's .bin and .idx. "" =
    the source text of Python's own standard library."""
    tokenizer: str = "bytes"
    """How text becomes tokens: a tokenizer.json, or bytes = one token a byte, 256 in all."""
    sequence_length: int = Field(ge=1)
    """Tokens predicted per sequence."""
    batch_size: int = Field(ge=1)
    """Sequences per step, over all devices."""
    separate_documents: bool = True
    """Whether documents in one sequence are hidden from each other. False = one stream."""
    bad_records: Literal["stop", "skip"] = "stop"
    """A record of prompt and completion that lacks one, or is too long for a sequence: stop = the
    run does not start; skip = it is left out and counted."""
    shuffle: bool = True
    """Whether every epoch has an order of its own. False = file order."""
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    """Part of the documents kept for validation. 0 = none."""
    cache: str = ""
    """Folder for prepared tokens. "" = $SHARDTRAIN_CACHE, else the user's cache folder."""
    prefetch: int = Field(2, ge=0)
    """Batches read ahead of the step. 0 = none."""


class MaskedTextConfig(BaseModel):
    """Text of which some tokens are hidden, and in what portions it is learned from."""

    model_config = _SECTION

    type: Literal["masked_text"] = "masked_text"
    """Which data this is."""
    path: str = ""
    """Text file, folder of text, JSONL or Parquet of text, or a prepared folder; each document by
    itself. "" = the source text of Python's own standard library."""
    tokenizer: str
    """How text becomes tokens: a tokenizer.json that has [MASK], [CLS] and [SEP]; or "wordpiece:N",
    lower-case WordPieces, N at most, learned once from the text itself and kept with the run."""
    sequence_length: int = Field(ge=8)
    """Tokens of a sample, special ones included."""
    batch_size: int = Field(ge=1)
    """Samples per step, over all devices."""
    mask_fraction: float = Field(0.15, gt=0.0, lt=1.0)
    """Part of a sample's tokens that are predicted; of those 80 percent are replaced by [MASK], 10
    by any token, 10 stay. Every epoch hides others, an evaluation always the same."""
    whole_words: bool = False
    """Whether all pieces of a word are predicted together; needs a tokenizer of WordPieces."""
    shuffle: bool = True
    """Whether every epoch has an order of its own. False = file order."""
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    """Part of the documents kept for validation. 0 = none."""
    cache: str = ""
    """Folder for prepared tokens. "" = $SHARDTRAIN_CACHE, else the user's cache folder."""
    prefetch: int = Field(2, ge=0)
    """Batches read ahead of the step. 0 = none."""

    @property
    def as_text(self) -> DataConfig:
        """The same text for whoever only reads and tokenizes it."""
        return DataConfig(
            path=self.path,
            tokenizer=self.tokenizer,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            validation_fraction=self.validation_fraction,
            cache=self.cache,
            prefetch=self.prefetch,
        )


class ImageDataConfig(BaseModel):
    """Images and their classes, and in what portions they are learned from."""

    model_config = _SECTION

    type: Literal["images"] = "images"
    """Which data this is."""
    path: str = ""
    """Folder with a folder a class, perhaps below train and val; CIFAR's binary files, .npz,
    WebDataset's .tar or Parquet, or a folder of them. "" = the handwritten digits that come with
    scikit-learn."""
    image_size: int = Field(ge=1)
    """Height and width that the model sees, in pixels."""
    channels: Literal[1, 3] = 3
    """1 = grey, 3 = red, green and blue."""
    batch_size: int = Field(ge=1)
    """Images per step, over all devices."""
    crop: Literal["none", "pad", "resized"] = "none"
    """How training images are cut: none = from the middle; pad = anywhere, after an eighth of the
    size was added on each side; resized = any part of 8 to 100 percent of the area, brought to
    size. Evaluation cuts from the middle."""
    flip: bool = False
    """Whether half of the training images are mirrored."""
    mixup: float = Field(0.0, ge=0.0)
    """Both parameters of the beta distribution that a training image's share is drawn from, the
    rest being another image of the batch (Zhang et al. 2017, arXiv 1710.09412). 0 = none."""
    mean: list[float] = [0.485, 0.456, 0.406]
    """What is taken off each channel of values from 0 to 1."""
    deviation: list[float] = [0.229, 0.224, 0.225]
    """What each channel is divided by then."""
    shuffle: bool = True
    """Whether every epoch has an order of its own. False = file order."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Part of the images kept for validation where the data has none of its own. 0 = none."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Images that cannot be read, and shards that are cut off: stop = say where and end; skip =
    take the next image in place of one, count it, and go on."""
    threads: int = Field(2, ge=1)
    """Threads of each process that read batches."""
    prefetch: int = Field(4, ge=0)
    """Batches read ahead of the step. 0 = none."""

    @field_validator("deviation")
    @classmethod
    def _divides(cls, value: list[float]) -> list[float]:
        if any(number <= 0 for number in value):
            raise ValueError("must be numbers above 0")
        return value


class InteractionsConfig(BaseModel):
    """Interactions of users with items, and in what portions they are learned from."""

    model_config = _SECTION

    type: Literal["interactions"] = "interactions"
    """Which data this is."""
    path: str = ""
    """A file, or a folder of shards. "" = interactions that are generated, of a known structure."""
    format: Literal["auto", "movielens", "criteo", "csv", "parquet"] = "auto"
    """movielens = u.data, ratings.dat or ratings.csv; criteo = a label, 13 numbers and 26 hex words
    a line; csv and parquet = the columns named here. auto = by the names of the files."""
    label: str = "label"
    """Column of the label, 0 or 1 (csv, parquet)."""
    dense: list[str] = []
    """Columns of numbers (csv, parquet); `model.num_dense` of them."""
    ids: list[str] = []
    """Columns of ids (csv, parquet), one for each table of the model."""
    positive: float = Field(4.0, ge=0.0)
    """Ratings from there on are label 1 (movielens)."""
    hash_ids: bool = False
    """Whether ids of any size, or words, are hashed to their table's rows (csv, parquet). Criteo's
    always are."""
    generated: int = Field(200_000, ge=2)
    """Interactions that are generated where there is no path."""
    batch_size: int = Field(ge=1)
    """Interactions per step, over all devices."""
    shards: Literal["global", "local"] = "global"
    """global = all shards are one data set, whichever process reads a row; local = process i of n
    reads every n-th shard from the i-th on, and has its own part of every batch from those."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """A row that cannot be used: stop = say file and line, and end; skip = leave it out and
    count."""
    shuffle: bool = True
    """Whether every epoch has an order of its own. False = file order."""
    validation_fraction: float = Field(0.1, ge=0.0, lt=1.0)
    """Part of the interactions kept for validation. 0 = none."""
    cache: str = ""
    """Folder for shards in binary form. "" = $SHARDTRAIN_CACHE, else the user's cache folder."""
    prefetch: int = Field(2, ge=0)
    """Batches read ahead of the step. 0 = none."""
