"""`train.precision`: names, parts, and which of them go together."""

import jax.numpy as jnp
import pytest

from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.strategies.precision import policy
from shardtrain.strategies.precision_words import NAMES, parse_precision
from shardtrain.train.flops import peak_flops


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_names_are_as_they_were(name: str) -> None:
    """16 bits with float32 masters and moments; reduced as they are made."""
    of = policy(name)
    assert (of.params, of.compute) == (name, name)
    assert {str(kind) for kind in (of.master, of.moments, of.accumulate)} == {"float32"}
    assert of.reduce is None
    assert of.has_master is (name != "float32")


def test_parts_say_all_that_differs() -> None:
    of = policy("params=float32,compute=bfloat16,accumulate=float32,moments=bfloat16")
    assert (of.params, of.compute, of.master, of.moments) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
        jnp.bfloat16,
    )
    assert not of.has_master


def test_parts_change_a_name() -> None:
    words = parse_precision("bfloat16, moments=bfloat16, rounding=stochastic")
    assert (words.params, words.master, words.moments, words.rounding) == (
        "bfloat16",
        "float32",
        "bfloat16",
        "stochastic",
    )
    assert parse_precision("bfloat16,master=bfloat16").has_master is False
    assert parse_precision("fp8,first=1,last=1").first == 1
    assert parse_precision("compute=bfloat16") == NAMES["bfloat16"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fp16", "allowed: float32, bfloat16, float16, fp8, fp8_delayed or float64"),
        ("bfloat16,moment=bfloat16", "unknown part"),
        ("bfloat16,moments=float8", "moments cannot be that"),
        ("bfloat16,moments=float16", "moments cannot be that"),
        ("bfloat16,first=-1", "first cannot be that"),
        ("compute=bfloat16,compute=float32", "compute is said twice"),
        ("params=bfloat16,compute=float32", "fewer bits than are computed with"),
        ("params=float16,compute=bfloat16", "lacks numbers of the other"),
        ("params=float32,compute=bfloat16,master=bfloat16", "fewer bits than rest"),
        ("float32,accumulate=bfloat16", "fewer bits than what is summed"),
        ("float16,accumulate=bfloat16", "lacks numbers of the other"),
        ("float16,master=bfloat16", "lacks numbers of the other"),
        ("bfloat16,reduce=float16", "reduce=bfloat16 or reduce=float32"),
        ("bfloat16,rounding=stochastic", "nothing that is updated rests in 16 bits"),
        ("float64,moments=float32", "goes with no other type"),
        ("float16,products=fp8", "fp8 stands for bfloat16 or float32"),
        ("bfloat16,first=1", "no layer is in fp8"),
        ("", "unknown precision"),
    ],
)
def test_what_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("quickstart", {"train.precision": text})
    assert words in str(error.value)
    assert "train.precision" in str(error.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("bf16-mixed", "bfloat16"),
        ("mixed_bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("16-mixed", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("double", "float64"),
        ("int8", "fp8"),
        ("float8_e4m3fn", "fp8"),
        ("bfloat", "bfloat16"),
        ("params=fp32,compute=bf16", "float32"),
        ("float32,compute=bf16", "bfloat16"),
        ("products=float8", "fp8"),
        ("param=float32", "params"),
    ],
)
def test_other_spellings_lead_to_ours(text: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_precision(text)
    assert caught.value.cure == f'did you mean "{meant}"?'


def test_what_is_like_nothing_gets_no_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_precision("quick")
    assert caught.value.cure == ""


def test_a_second_moment_that_would_never_decay_is_refused() -> None:
    """O-14: 0.999 x in bfloat16 is x; by chance, or with a smaller beta2, it does decay."""
    keys = {"train.precision": "bfloat16,moments=bfloat16", "optimizer.beta2": 0.999}
    with pytest.raises(ConfigError, match=r"optimizer\.beta2=0\.999.*never decay"):
        load_config("quickstart", keys)
    load_config("quickstart", {**keys, "optimizer.beta2": 0.99})
    load_config("quickstart", {**keys, "optimizer.name": "lion"})
    chance = {"train.precision": "bfloat16,moments=bfloat16,rounding=stochastic"}
    load_config("quickstart", keys | chance)


def test_wider_reduction_is_refused_where_gradients_are_scattered_as_they_are_made() -> None:
    keys = {"train.precision": "bfloat16,reduce=float32", "mesh.data": 2}
    load_config("quickstart", keys | {"sharding.zero": 1})
    with pytest.raises(ConfigError, match=r"sharding\.zero=2 scatters each gradient"):
        load_config("quickstart", keys | {"sharding.zero": 2})


def test_layers_that_are_kept_out_of_fp8_leave_some() -> None:
    with pytest.raises(ConfigError, match="leaves no layer in fp8"):
        load_config("quickstart", {"train.precision": "fp8,first=2,last=2", "model.num_layers": 4})


def test_peaks_are_those_of_the_products() -> None:
    class H100:
        device_kind = "NVIDIA H100 80GB HBM3"

    mix = "params=float32,compute=bfloat16"
    assert peak_flops(H100, mix) == peak_flops(H100, "bfloat16") == 989.4e12  # type: ignore[arg-type]
    assert peak_flops(H100, "fp8") == 1978.9e12  # type: ignore[arg-type]
