"""Systems that chips are usually in, each with the page that describes it.

Owns: host memory, network and disks of a typical host. Does not own: which chip is in which
(`chips`).

The network is the cards that are there for traffic between chips; those for storage are left out.
NVIDIA does not say how fast the disks of its systems are.
"""

from dataclasses import replace

from shardtrain.sharding.chip import Host

DGX_1 = Host(
    name="DGX-1 with V100",
    chips=8,
    memory=512e9,
    network=4 * 100e9 / 8,
    source="NVIDIA DGX-1 system architecture whitepaper (2017)",
)
DGX_A100 = Host(
    name="DGX A100 (640 GB)",
    chips=8,
    memory=2e12,
    network=8 * 200e9 / 8,
    source="NVIDIA DGX A100 user guide (2021)",
)
DGX_A100_320 = replace(DGX_A100, name="DGX A100 (320 GB)", memory=1e12)
DGX_H100 = Host(
    name="DGX H100",
    chips=8,
    memory=2e12,
    network=8 * 400e9 / 8,
    source="NVIDIA DGX H100/H200 user guide (2024)",
)
DGX_B200 = replace(DGX_H100, name="DGX B200", source="NVIDIA DGX B200 user guide (2025)")
DGX_B300 = Host(
    name="DGX B300",
    chips=8,
    network=8 * 800e9 / 8,
    source="NVIDIA DGX B300 user guide (2025)",
)
TRAY_GB200 = Host(
    name="DGX GB200 compute tray",
    chips=4,
    memory=2 * 480e9,
    network=4 * 400e9 / 8,
    source="NVIDIA DGX GB200 user guide; GB200 NVL72 specifications, 17 TB for 36 CPUs (2025)",
)
TRAY_GB300 = Host(
    name="GB300 NVL72 compute tray",
    chips=4,
    network=4 * 800e9 / 8,
    source="NVIDIA NVL72 AI factory reference architecture (2025)",
)
DESKTOP = Host(
    name="desktop",
    chips=1,
    disk_read=7.45e9,
    disk_write=6.9e9,
    source="Samsung 990 PRO datasheet (2022): one such drive",
)
