"""The table of chips, clusters of them, and chips from a user's file."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from shardtrain.errors import ConfigError
from shardtrain.plan import targets
from shardtrain.plan.hardware import Cluster, parse_cluster, read_chips
from shardtrain.plan.targets import Target, descriptions, missing_parts, require_compiler
from shardtrain.sharding.chip import KINDS, Chip, FastLink
from shardtrain.sharding.chips import CHIPS, KNOWN_KINDS
from shardtrain.train.flops import PEAK_FLOPS

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = [chip for chip in CHIPS.values() if chip.name != "cpu"]


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


# -- the rows


@pytest.mark.parametrize("chip", MEASURED, ids=lambda chip: chip.name)
def test_each_figure_has_a_source(chip: Chip) -> None:
    for figure in ("flops", "memory_gb", "memory_bandwidth", "host_link"):
        assert getattr(chip, figure), figure
        assert re.search(r"\b20\d\d\b", chip.sources[figure]), figure
    assert (chip.usable_memory is not None) == ("usable_memory" in chip.sources)
    for part in (chip.fast_link, chip.host):
        assert part is None or re.search(r"\b20\d\d\b", part.source)
    assert chip.price_per_hour is None


@pytest.mark.parametrize("chip", MEASURED, ids=lambda chip: chip.name)
def test_figures_are_plausible(chip: Chip) -> None:
    """A slip of a unit, or a rate with sparsity, shows."""
    rates = chip.flops
    assert set(rates) <= set(KINDS)
    half = rates.get("bfloat16", rates.get("float16", 0))
    assert 50e12 < half < 3000e12
    if "tf32" in rates:
        assert 1.9 < half / rates["tf32"] < 2.1
    if "float8" in rates and rates["float8"] != half:
        assert 1.9 < rates["float8"] / half < 2.1
    assert 0.9 < chip.memory / (chip.memory_gb * 1e9) < 2**30 / 1e9 + 1e-6
    assert 100e9 < chip.memory_bandwidth < 10e12
    assert 10e9 < chip.host_link < chip.memory_bandwidth
    assert chip.fast_link is None or chip.host_link < chip.fast_link.bandwidth < 1e12
    if chip.host and chip.host.network:
        assert 3e9 < chip.host.network / chip.host.chips <= 100e9


@pytest.mark.parametrize(
    ("name", "field", "figure"),
    [
        ("a100-80", "memory_bandwidth", 2039e9),
        ("h100", "host_link", 64e9),
        ("gb200", "usable_memory", 197897748480),
        ("tpu-v5p", "memory_bandwidth", 2765e9),
    ],
)
def test_figures_of_the_datasheets(name: str, field: str, figure: float) -> None:
    assert getattr(CHIPS[name], field) == figure


def test_a_kind_of_device_is_one_chip() -> None:
    assert sum(len(chip.device_kinds) for chip in CHIPS.values()) == len(KNOWN_KINDS)
    assert KNOWN_KINDS["NVIDIA H200"] is CHIPS["h200"]
    assert PEAK_FLOPS["NVIDIA H100 PCIe"]["bfloat16"] == 756e12
    assert "cpu" not in PEAK_FLOPS


def test_names_of_targets() -> None:
    assert targets.CHIPS["h200"] == "NVIDIA H200 141GB HBM3e"
    assert set(targets.CHIPS) <= set(CHIPS)
    for chip in CHIPS.values():
        assert chip.target is None or chip.target in targets.CHIPS
        assert chip.compiler_name is None or chip.compile_as is None
    with pytest.raises(ConfigError, match="a6000 is the nearest"):
        Target("rtx4090", 1, 1)


@pytest.mark.aot
@pytest.mark.skipif(bool(missing_parts()), reason="needs " + " and ".join(missing_parts()))
@pytest.mark.parametrize("name", targets.CHIPS)
def test_figures_agree_with_the_compiler(name: str) -> None:
    text = descriptions(require_compiler())[targets.CHIPS[name]]
    seen, bandwidth = (
        int(re.search(rf"^  {key}: (\d+)$", text, re.MULTILINE)[1])
        for key in ("device_memory_size", "memory_bandwidth")
    )
    assert CHIPS[name].usable_memory == seen
    assert CHIPS[name].memory_bandwidth == pytest.approx(bandwidth, rel=0.06)


def test_the_page_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_hardware.py"))["page"]()
    assert (DOCS / "hardware.md").read_text("utf-8") == made, "run docs/make_hardware.py"


# -- clusters


def test_a_cluster() -> None:
    cluster = parse_cluster("h100:64x8")
    assert cluster == Cluster(CHIPS["h100"], hosts=64, per_host=8)
    assert (str(cluster), cluster.num_devices, cluster.domain) == ("h100:64x8", 512, 8)
    assert (cluster.fast_link, cluster.network_per_device) == (450e9, 50e9)
    assert cluster.notes() == []


def test_a_desktop() -> None:
    cluster = parse_cluster("rtx4090:1x1")
    assert (cluster.num_devices, cluster.domain, cluster.fast_link) == (1, 1, None)
    assert cluster.notes() == [
        "rtx4090 is compiled as a6000, the nearest that the compiler knows",
        "no figure for host memory of rtx4090",
    ]


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("h100:4x4", 4),  # NVLink ends at the host
        ("h100:1x16", 8),
        ("h100:4x1", 1),
        ("gb200:1x4", 4),  # that of a rack does not
        ("gb200:18x4", 72),
        ("gb200:36x4", 72),
        ("gb200:4x1", 4),
        ("gb200:20x5", 70),  # whole hosts
        ("tpu-v5e:64x8", 256),
        ("a100-80-pcie:1x8", 2),
        ("l4:2x4", 1),
        ("cpu:1x2", 1),
    ],
)
def test_what_the_fast_link_joins(text: str, domain: int) -> None:
    cluster = parse_cluster(text)
    assert cluster.domain == domain
    assert (cluster.fast_link is None) == (domain == 1)


def test_the_network_of_a_host_is_shared() -> None:
    assert parse_cluster("h100:8x4").network_per_device == 50e9  # one card for each, not two
    crowded = parse_cluster("h100:8x16")
    assert crowded.network_per_device == 25e9
    assert any("shared by 16" in note for note in crowded.notes())
    assert parse_cluster("l40s:8x4").network_per_device is None


def test_more_chips_than_the_link_joins() -> None:
    (pairs, missing) = parse_cluster("a100-80-pcie:2x8").notes()
    assert pairs == "NVLink 3 joins 2 of the 8 chips of a host; the rest goes over the host's bus"
    assert missing == "no figure for host memory, network of a100-80-pcie"
    assert parse_cluster("l4:1x4").notes()[1].startswith("no fast link joins the 4 chips")


@pytest.mark.parametrize("text", ["h100", "h100:8", "h100:0x8", "h100:1x", "h100 1x8", "1x8"])
def test_not_a_cluster(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a cluster[\s\S]*h100:64x8 or rtx4090:1x1"):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [("H100:1x8", "h100"), ("v5e:1x8", "tpu-v5e"), ("rtx-4090:1x1", "rtx4090")],
)
def test_an_unknown_chip(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"target: there is no such chip[\s\S]*{near}\?$"):
        parse_cluster(text)


# -- a user's file

MINE = """
[card]
device_kinds = ["NVIDIA GeForce RTX 3090"]
compile_as = "a6000"
flops = { bfloat16 = 71e12, float32 = 35.6e12 }
memory_gb = 24
memory_bandwidth = 936e9
host_link = 32e9
source = "its whitepaper"
fast_link = { name = "NVLink 3", bandwidth = 56.25e9, chips = 2 }

[h100]
like = "h100"
price_per_hour = 2
host = { network = 25e9 }

[h100-94]
like = "h100"
memory_gb = 94
flops = { bfloat16 = 835e12 }
"""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_rate_can_be_given(tmp_path: Path, kind: str) -> None:
    chips = read_chips(write(tmp_path, f"[a]\nflops = {{ {kind} = 1e12 }}"))
    assert chips["a"].flops == {kind: 1e12}


def test_chips_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINE)
    chips = read_chips(path)
    assert set(chips) == {*CHIPS, "card", "h100-94"}
    card = chips["card"]
    assert card.fast_link == FastLink(
        name="NVLink 3", bandwidth=56.25e9, chips=2, source="its whitepaper"
    )
    assert (card.memory, card.host, card.target) == (24e9, None, "a6000")
    assert parse_cluster("card:1x4", chips).domain == 2
    assert set(card.sources.values()) == {"its whitepaper"}


def test_a_chip_like_another(tmp_path: Path) -> None:
    path = write(tmp_path, MINE)
    chips, known = read_chips(path), CHIPS["h100"]
    dearer = chips["h100"]
    assert dearer.price_per_hour == 2
    assert (dearer.host.network, dearer.host.memory) == (25e9, known.host.memory)
    assert dearer.host.source == str(path)
    assert (dearer.flops, dearer.fast_link, dearer.target) == (known.flops, known.fast_link, "h100")
    larger = chips["h100-94"]
    assert larger.flops == {**known.flops, "bfloat16": 835e12}
    assert larger.memory == 94e9  # not the bytes that are seen of 80 GB
    assert (larger.compiler_name, larger.target) == (None, "h100")
    assert larger.sources["flops"] == str(path)
    assert larger.sources["host_link"] == known.sources["host_link"]
    assert CHIPS["h100"].price_per_hour is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nmemory = 3", r"a\.memory: unknown key[\s\S]*did you mean memory_gb\?$"),
        ("[a]\nhost = { chips = 1, ram = 2e9 }", r"a\.host\.ram: unknown key\n  allowed: name, ch"),
        (
            "[a]\nflops = { bf16 = 1e12 }",
            r"a\.flops\.bf16: unknown key[\s\S]*did you mean bfloat16",
        ),
        ("[a]\nhost_link = '32'", r"a\.host_link: should be a valid number\n  value: '32'"),
        ("[a]\nhost_link = 0", r"a\.host_link: should be greater than 0\n  value: 0"),
        ("[a]\nhost_link = inf", r"a\.host_link: should be a finite number"),
        ("[a]\nusable_memory = 1.5", r"a\.usable_memory: "),
        ("[a]\nfast_link = { chips = 2 }", r"a\.fast_link\.bandwidth: is missing"),
        ("[a]\nfast_link = 3", r"a\.fast_link: "),
        ("[a]\nlike = 'h10'", r"a\.like: there is no such chip[\s\S]*did you mean h100\?"),
        ("[a]\nlike = 3", r"a\.like: should be a valid string"),
        ("[a]\ncompile_as = 'rtx4090'", r"a\.compile_as: the compiler has no such chip"),
        ("a = 3", r"mine\.toml: a: not a chip"),
        ("[A_1]\nmemory_gb = 3", r"mine\.toml: A_1: not a chip"),
        ("[a]\nhost_link = ", r"mine\.toml: not TOML: .*"),
    ],
)
def test_a_fault_of_a_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read_chips(write(tmp_path, text))
    assert "mine.toml: " in str(refused.value)


def test_all_faults_of_a_file_together(tmp_path: Path) -> None:
    path = write(tmp_path, "[a]\nhost_link = 0\nmemory = 1\n[b]\nlike = 'c'\n[c]\nx = 1\ny = 1")
    with pytest.raises(ConfigError) as refused:
        read_chips(path)
    message = str(refused.value)
    for key in ("a.host_link", "a.memory", "b.like", "c.x", "c.y"):
        assert message.count(f"{path}: {key}: ") == 1


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file"):
        read_chips(tmp_path / "none.toml")


def test_the_file_of_the_page(tmp_path: Path) -> None:
    (block,) = re.findall(r"(?ms)^```toml\n(.*?)^```$", (DOCS / "hardware.md").read_text("utf-8"))
    chips = read_chips(write(tmp_path, block))
    assert set(tomllib.loads(block)) <= set(chips)
    assert parse_cluster("h100:64x8", chips).network_per_device == 25e9 / 8
