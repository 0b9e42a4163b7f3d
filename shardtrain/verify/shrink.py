"""A small run of the same kind: the same layout and choices at sizes that run in seconds."""

import math
from collections.abc import Mapping
from typing import Any

Sections = dict[str, Any]


def shrunk(sections: Mapping[str, Any], degrees: Mapping[str, int]) -> Sections:
    """Shrinks every size to the smallest that the mesh still divides.

    Args:
        sections: a whole config as nested dicts.
        degrees: the degree of every mesh axis.

    Returns:
        A config as nested dicts. Kinds, ratios of heads, tokenizer and vocabulary stay.
    """
    model, data = dict(sections["model"]), dict(sections["data"])
    tensor = degrees["tensor"]
    heads, kv_heads = model["num_heads"], model["num_kv_heads"] or model["num_heads"]
    # Of Ulysses every device of a sequence has key/value heads of its own.
    shares = tensor * (degrees["context"] if model["attention"] == "ulysses" else 1)
    kv = min(kv_heads, max(shares, 2) if kv_heads % max(shares, 2) == 0 else shares)
    # The width divides by every axis that state may be split over.
    unit = math.lcm(8, degrees["data"] * degrees["context"])
    pipeline = sections["pipeline"]
    parts = degrees["pipeline"] * pipeline["virtual_stages"]
    if not (pipeline["layout"] or pipeline["table"]):  # these say how many layers, or parts
        uneven = -model["num_layers"] % parts
        model["num_layers"] = min(model["num_layers"], 2 * parts - uneven)
    model |= {
        "num_kv_heads": kv,
        "num_heads": kv * (heads // kv_heads),
        "head_dim": 8,
        "embed_dim": min(model["embed_dim"], math.lcm(unit, 32)),
        "mlp_dim": math.lcm(unit, 32) * tensor,
        "max_length": 0,
        "layer_loop": "scan",
    }
    length = math.lcm(16, 2 * degrees["context"] * tensor)
    rows = degrees["replica"] * degrees["data"] * sections["train"]["microbatches"]
    data |= {
        "sequence_length": min(data["sequence_length"], length),
        "batch_size": min(data["batch_size"], 2 * rows),
    }
    return {**sections, "model": model, "data": data}
