"""Against transformers itself, where the extra `reference` is installed.

The package and its dependencies raise warnings of their own, so they run in processes of theirs.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shardtrain import cli
from tests.interop.imported import ALL, BERTS, MODELS, NAMES, run_import, tensors_in

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("torch") is None,
    reason="needs the extra `reference`",
)
LOADS = """
import sys
from pathlib import Path
import numpy as np
import transformers
from tests.interop.make_fixtures import MODELS, logits
for folder in sorted(Path(sys.argv[1]).glob("*_hf")):
    name = folder.name.removesuffix("_hf")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values()), (name, told)
    np.save(folder / "logits.npy", logits(model.eval(), np.load(MODELS / name / "ids.npy")))
"""


def run(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_models_are_made_anew(tmp_path: Path) -> None:
    """The same weights bit for bit, and the logits but for rounding."""
    run("-m", "tests.interop.make_fixtures", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ALL
    for name in ALL:
        assert tensors_in(tmp_path / name) == tensors_in(MODELS / name)
        heads = (("next", 1e-5),) if name == "bert" else ()
        for array, bound in (("ids", 0.0), ("logits", 1e-5), *heads):
            made, kept = (np.load(p / name / f"{array}.npy") for p in (tmp_path, MODELS))
            np.testing.assert_allclose(made, kept, atol=bound, rtol=0)


def test_exports_load(tmp_path: Path) -> None:
    """No key is missing, unexpected or mis-shaped, and the logits are the same."""
    for name in NAMES:
        assert run_import(MODELS / name, tmp_path / name) == 0
        assert cli.main(["export", str(tmp_path / name), "--out", f"{tmp_path / name}_hf"]) == 0
    run("-c", LOADS, str(tmp_path))
    for name in NAMES:
        found, kept = (np.load(p / "logits.npy") for p in (tmp_path / f"{name}_hf", MODELS / name))
        np.testing.assert_allclose(found, kept, atol=1e-6, rtol=0)


BERT = """
import sys
from pathlib import Path
import numpy as np
import torch
import transformers
from tests.interop.make_fixtures import MODELS, bert_logits
for folder in sorted(Path(sys.argv[1]).glob("*_hf")):
    name = folder.name.removesuffix("_hf")
    kind = "BertForPreTraining" if name == "bert" else "BertForMaskedLM"
    model, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), (name, told)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    found = bert_logits(model.eval(), np.load(MODELS / name / "ids.npy"))
    for what, array in found.items():
        np.save(folder / f"{what}.npy", array)
"""
SIZES = """
import torch
import transformers
large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096}
for sizes in ({}, large):
    with torch.device("meta"):
        model = transformers.BertForPreTraining(transformers.BertConfig(**sizes))
    print(sum(parameter.numel() for parameter in model.parameters()))
"""


def test_exports_of_bert_load(tmp_path: Path) -> None:
    """No key is missing, unexpected or mis-shaped; the decoder is tied; the scores are the same."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    words = {f"w{i}": i for i in range(261)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(path))
    for name in BERTS:
        flags = ("--data.tokenizer", str(path))
        assert run_import(MODELS / name, tmp_path / name, *flags) == 0
        assert cli.main(["export", str(tmp_path / name), "--out", f"{tmp_path / name}_hf"]) == 0
    run("-c", BERT, str(tmp_path))
    for name, what in (("bert", "logits"), ("bert", "next"), ("bert_masked", "logits")):
        found, kept = (np.load(p / f"{what}.npy") for p in (tmp_path / f"{name}_hf", MODELS / name))
        np.testing.assert_allclose(found, kept, atol=1e-6, rtol=0)


def test_published_berts_have_so_many_parameters() -> None:
    done = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["110106428", "336226108"]
