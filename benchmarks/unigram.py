"""What predicting hidden tokens costs whoever does not read: the entropy of single tokens.

    python -m benchmarks.unigram bert_mini

prints, in nats: the cross-entropy of the tokens that an evaluation hides under the frequencies of
the training tokens (the least that `val_loss` can be without reading any context), and the entropy
of those frequencies.
"""

import sys

import numpy as np

from shardtrain.config import load_config
from shardtrain.run_bert import BertWork


def unigram(name: str) -> tuple[float, float]:
    """The two figures for a config.

    Args:
        name: of a config for BERT.
    """
    config = load_config(name)
    data, validation, info = BertWork(config).open_data(print)
    assert validation is not None, "there is nothing to evaluate on"
    special = [data.pieces.cls, data.pieces.sep, data.pieces.pad, data.pieces.mask]
    counts = np.bincount(data.tokens, minlength=info.vocab_size).astype(float)
    counts[special] = 0
    # a token that training never has seen still has some probability
    share = (counts + 1) / (counts + 1).sum()
    batches = range(validation.evaluation_batches(config.eval.steps))
    read = [validation.evaluation_rows(i, 0, validation.batch_size) for i in batches]
    hidden = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in read])
    seen = counts[counts > 0] / counts.sum()
    return float(-np.log(share[hidden]).mean()), float(-(seen * np.log(seen)).sum())


if __name__ == "__main__":
    cross, entropy = unigram(sys.argv[1] if len(sys.argv) > 1 else "bert_mini")
    print(f"without reading: {cross:.4f} nats a hidden token; entropy {entropy:.4f}")
