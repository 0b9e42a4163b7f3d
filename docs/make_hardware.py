"""Writes `docs/hardware.md`, the page of all chips, from the table itself.

python docs/make_hardware.py      after a row has changed; a test fails while the page is stale
"""

import sys
from pathlib import Path

from shardtrain.sharding.chip import KINDS, Chip
from shardtrain.sharding.chips import CHIPS

PAGE = Path(__file__).with_name("hardware.md")
INTRODUCTION = """\
# Chips and hosts

<!-- Made by docs/make_hardware.py from shardtrain/sharding/chips.py; do not edit. -->

What plans and utilisation are computed with. A cluster is written `CHIP:HOSTSxCHIPS`, such as
`h100:64x8`; a desktop with one card is `rtx4090:1x1`. The number in brackets after a figure is its
source, listed below. A dash means that there is no such thing, or no source for it: then there
is no figure, and a plan that needs it says so. TB, GB and TFLOP are powers of ten.

- Rates are dense. Where a datasheet has them only with sparsity, half is taken. float32 is without
  TF32, and tf32 is with it. float64 is with matrix units where a chip has them. 16-bit products add
  up in float32. Model FLOPs utilisation is over these rates.
- Memory is first as the maker names it, which may be GB or GiB, then the bytes that a program sees.
  A plan uses those, and where there are none, GB of 1e9 bytes.
- Links are bytes per second in one direction, where datasheets add both. The fast link is that of
  one chip, over all its links together: on a torus, a ring along one axis has only two of them. It
  joins at most the chips of its domain. Only that of racks and pods goes on from host to host.
- Hosts are those that a chip is usually in. The network is the cards for traffic between chips. A
  device has its chip's part of it; more chips in a host share it.
- A chip that the compiler for absent GPUs has no target of is compiled as the nearest that it has.
- Prices are left to you.

These are peaks of datasheets. What a program reaches is less, and is not on this page.

Not read again in the document that is named, and to be checked before money depends on them: the
rows `v100`, `h200`, `a6000` and `rtx6000-ada`; float32 and float64 of `gb200`; memory of `b300` and
`gb300`; the fast link of `tpu-v4`.
"""
OWN = """\
## Your own chips

`read_chips` in `shardtrain/plan/hardware.py` reads a TOML file with one table a chip. `like` is the
chip whose figures it has where it gives none of its own. With its own name in `like`, a row of the
table above is changed.

```toml
[h100]                       # the same chip, in another host and with a price
like = "h100"
price_per_hour = 2.5         # of one chip, in any currency
host = { network = 25e9 }    # bytes/s of all cards together

[my-card]
compile_as = "a6000"
flops = { bfloat16 = 71e12, float32 = 35.6e12 }
memory_gb = 24
memory_bandwidth = 936e9
host_link = 32e9
source = "its datasheet"
```

The keys are `like`, `source`, `device_kinds`, `compile_as`, `flops`, `memory_gb`, `usable_memory`,
`memory_bandwidth`, `host_link`, `price_per_hour`, `fast_link` (`name`, `bandwidth`, `chips`,
`between_hosts`) and `host` (`name`, `chips`, `memory`, `network`, `disk_read`, `disk_write`). Rates
are FLOP/s, bandwidths bytes/s, memory of a host bytes.
"""
REMARKS = """\
## Remarks

- `cpu` has no figures. Those of a machine are measured on it.
- The disks of NVIDIA's systems, and of Google's hosts, are left out: their pages give sizes, not
  speeds. Cards that come in any server have no host, so no network: give your own.
- The memory of hosts of B300, GB300 and TPU v4, and float64 of B300 and GB300, are left out too, as
  are float32 rates of TPUs, which are not published.
- Bandwidth of memory of Blackwell is what the compiler's description says: datasheets round it to
  8 TB/s.
- L40S: the datasheet's dense 16-bit rate, 362 TFLOP/s, does not agree with its sparse one, nor with
  its TF32 and FP8 rates. Half of the sparse one does.
- RTX and L cards multiply float64 at a 64th of their float32 rate, by the whitepapers of GA102 and
  Ada.
- V100 multiplies no bfloat16. Its NVLink in DGX-1 is a cube mesh: not every pair is joined.
- A100 80 GB PCIe: the compiler's description has fewer bytes than that of the same memory on SXM.
"""


class Sources:
    """Numbers of sources, by first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def cell(self, text: str | None, source: str) -> str:
        """A figure and the number of its source."""
        if text is None:
            return "-"
        return f"{text} [{self.numbers.setdefault(source, len(self.numbers) + 1)}]"


def page() -> str:
    """The page: three tables and the list of their sources."""
    sources = Sources()
    chips = [chip for chip in CHIPS.values() if chip.flops]
    parts = [
        INTRODUCTION,
        "## Rates, TFLOP/s\n",
        table(("chip", "device_kind", *KINDS, "source"), [rates(c, sources) for c in chips]),
        "## Memory and links\n",
        table(
            ("chip", "memory", "bytes seen", "bandwidth", "fast link", "domain", "to the host"),
            [memory(c, sources) for c in chips],
        ),
        "## Hosts and targets\n",
        table(
            ("chip", "host", "chips", "memory", "network", "disk, read / write", "compiled as"),
            [host(c, sources) for c in chips],
        ),
        OWN,
        REMARKS,
        "## Sources\n",
        "\n".join(f"{number}. {source}" for source, number in sources.numbers.items()) + "\n",
    ]
    return "\n".join(parts)


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def rates(chip: Chip, sources: Sources) -> list[str]:
    """A row of the first table."""
    cells = [f"{chip.flops[kind] / 1e12:.4g}" if kind in chip.flops else "-" for kind in KINDS]
    source = sources.cell("", chip.sources["flops"]).strip()
    return [f"`{chip.name}`", ", ".join(chip.device_kinds), *cells, source]


def memory(chip: Chip, sources: Sources) -> list[str]:
    """A row of the second table."""
    link = chip.fast_link
    reach = (
        f"{link.chips} chips, {'more hosts' if link.between_hosts else 'one host'}" if link else "-"
    )
    return [
        f"`{chip.name}`",
        sources.cell(f"{chip.memory_gb:g} GB", chip.sources["memory_gb"]),
        sources.cell(
            f"{chip.usable_memory}" if chip.usable_memory else None,
            chip.sources.get("usable_memory", ""),
        ),
        sources.cell(speed(chip.memory_bandwidth), chip.sources["memory_bandwidth"]),
        sources.cell(f"{link.name}, {speed(link.bandwidth)}", link.source) if link else "-",
        reach,
        sources.cell(speed(chip.host_link), chip.sources["host_link"]),
    ]


def host(chip: Chip, sources: Sources) -> list[str]:
    """A row of the third table."""
    usual = chip.host
    target = chip.target
    own = [f"`{target}`" if target else "-"]
    if usual is None:
        return [f"`{chip.name}`", *["-"] * 5, *own]
    disk = f"{speed(usual.disk_read)} / {speed(usual.disk_write)}" if usual.disk_read else "-"
    return [
        f"`{chip.name}`",
        sources.cell(usual.name, usual.source),
        str(usual.chips),
        f"{usual.memory / 1e9:.0f} GB" if usual.memory else "-",
        speed(usual.network) or "-",
        disk,
        *own,
    ]


def speed(figure: float | None) -> str | None:
    """Bytes per second in words."""
    if figure is None:
        return None
    return f"{figure / 1e12:.4g} TB/s" if figure >= 1e12 else f"{figure / 1e9:.4g} GB/s"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(CHIPS)} chips\n")
