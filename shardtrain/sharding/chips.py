"""The table of chips: one row a chip, by our short name for it, each figure with its source.

Owns: the rows. Does not own: what a figure means (`chip`), clusters and chips from a user's file
(`plan/hardware.py`), or what a step costs. `docs/hardware.md` is made from this table.

A datasheet that adds both directions of a link is halved. Where it has a rate only with sparsity,
half of that is the dense one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from shardtrain.sharding.chip import KINDS, Chip, FastLink, Host
from shardtrain.sharding.hosts import (
    DESKTOP,
    DGX_1,
    DGX_A100,
    DGX_A100_320,
    DGX_B200,
    DGX_B300,
    DGX_H100,
    TRAY_GB200,
    TRAY_GB300,
)

_COMPILER = "XLA's description of the target, in jax 0.12's CUDA plug-in (2026)"
_V100 = "NVIDIA V100 datasheet (2020)"
_A100 = "NVIDIA A100 datasheet (2022)"
_H100 = "NVIDIA H100 architecture whitepaper 1.04 (2023)"
_H200 = "NVIDIA H200 datasheet (2024)"
_B200 = "NVIDIA HGX B200 specifications (2025), of 8; 16-bit, TF32 and FP8 halved from sparse"
_GB200 = "NVIDIA GB200 NVL72 specifications (2025), of 72; 16-bit, TF32 and FP8 halved from sparse"
_B300 = "NVIDIA HGX B300 specifications (2025), of 8; 16-bit, TF32 and FP8 halved from sparse"
_GB300 = "NVIDIA GB300 NVL72 specifications (2025), of 72; 16-bit, TF32 and FP8 halved from sparse"
_ULTRA = "NVIDIA technical blog, Inside Blackwell Ultra (2025)"
_PRO_6000 = "NVIDIA RTX Blackwell PRO GPU architecture whitepaper (2025)"
_ADA = "NVIDIA Ada GPU architecture whitepaper 2.01 (2023)"
_GA102 = "NVIDIA Ampere GA102 architecture whitepaper 2.0 (2021)"
_L40S = "NVIDIA L40S datasheet (2023); 16-bit halved from sparse; float64: Ada whitepaper"
_L4 = "NVIDIA L4 datasheet (2023); TF32, 16-bit and FP8 halved from sparse; float64: Ada whitepaper"
_TPU = "Google Cloud documentation, page of this TPU (2025)"
_BOOK = "How to Scale Your Model, part 2 (Austin et al. 2025, jax-ml.github.io/scaling-book)"
_PCIE_3 = "PCIe Gen3 x16: 32 GB/s both ways, NVIDIA V100 datasheet (2020)"
_PCIE_4 = "PCIe Gen4 x16: 64 GB/s both ways, NVIDIA A100 datasheet (2022)"
_PCIE_5 = "PCIe Gen5 x16: 128 GB/s both ways, NVIDIA H100 datasheet (2023)"
_C2C = "NVLink-C2C: 900 GB/s both ways for two GPUs, NVIDIA GB200 NVL72 specifications (2025)"


def _sources(
    flops: str, memory: str, host_link: str, *, usable: str = "", bandwidth: str = ""
) -> dict[str, str]:
    """Where the figures of a row are from; the memory's for both of its figures by default."""
    rows = {"flops": flops, "memory_gb": memory, "memory_bandwidth": bandwidth or memory}
    return rows | {"host_link": host_link} | ({"usable_memory": usable} if usable else {})


def _nvlink(version: int, speed: float, chips: int, source: str, rack: bool = False) -> FastLink:
    name = f"NVLink {version}"
    return FastLink(name=name, bandwidth=speed, chips=chips, between_hosts=rack, source=source)


def _rates(
    half: float,
    single: float,
    *,
    tf32: float | None = None,
    double: float | None = None,
    eight: float | None = None,
) -> dict[str, float]:
    """Rates in TFLOP/s as `Chip.flops`: of both 16-bit formats, of float32 and of the others."""
    rates = zip(KINDS, (half, half, single, tf32, double, eight), strict=True)
    return {kind: rate * 1e12 for kind, rate in rates if rate is not None}


_FLOPS_A100 = _rates(312, 19.5, tf32=156, double=19.5)
_FLOPS_H100 = _rates(989.4, 66.9, tf32=494.7, double=66.9, eight=1978.9)

_GPUS = (
    Chip(
        name="v100",
        device_kinds=("Tesla V100-SXM2-16GB",),
        compiler_name="Tesla V100-SXM2-16GB",
        flops={"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12},
        memory_gb=16,
        usable_memory=16935682048,
        memory_bandwidth=900e9,
        fast_link=_nvlink(2, 150e9, 8, _V100 + "; 8 in a cube mesh, not all to all, in DGX-1"),
        host_link=16e9,
        host=DGX_1,
        sources=_sources(_V100, _V100, _PCIE_3, usable=_COMPILER),
    ),
    Chip(
        name="a100-40",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        compiler_name="NVIDIA A100-SXM4-40GB",
        flops=_FLOPS_A100,
        memory_gb=40,
        usable_memory=42331013120,
        memory_bandwidth=1555e9,
        fast_link=_nvlink(3, 300e9, 8, _A100),
        host_link=32e9,
        host=DGX_A100_320,
        sources=_sources(_A100, _A100, _PCIE_4, usable=_COMPILER),
    ),
    Chip(
        name="a100-80",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        compiler_name="NVIDIA A100-SXM4-80GB",
        flops=_FLOPS_A100,
        memory_gb=80,
        usable_memory=85100068864,
        memory_bandwidth=2039e9,
        fast_link=_nvlink(3, 300e9, 8, _A100),
        host_link=32e9,
        host=DGX_A100,
        sources=_sources(_A100, _A100, _PCIE_4, usable=_COMPILER),
    ),
    Chip(
        name="a100-40-pcie",
        device_kinds=("NVIDIA A100-PCIE-40GB",),
        compile_as="a100-40",
        flops=_FLOPS_A100,
        memory_gb=40,
        memory_bandwidth=1555e9,
        fast_link=_nvlink(3, 300e9, 2, _A100 + ", with bridges"),
        host_link=32e9,
        sources=_sources(_A100, _A100, _PCIE_4),
    ),
    Chip(
        name="a100-80-pcie",
        device_kinds=("NVIDIA A100 80GB PCIe",),
        compiler_name="NVIDIA A100 80GB PCIe",
        flops=_FLOPS_A100,
        memory_gb=80,
        usable_memory=79050250240,
        memory_bandwidth=1935e9,
        fast_link=_nvlink(3, 300e9, 2, _A100 + ", with bridges"),
        host_link=32e9,
        sources=_sources(_A100, _A100, _PCIE_4, usable=_COMPILER),
    ),
    Chip(
        name="a6000",
        device_kinds=("NVIDIA RTX A6000",),
        compiler_name="NVIDIA RTX A6000",
        flops=_rates(154.8, 38.7, tf32=77.4, double=38.7 / 64),
        memory_gb=48,
        usable_memory=51041271808,
        memory_bandwidth=768e9,
        fast_link=_nvlink(3, 56.25e9, 2, _GA102 + ", with a bridge"),
        host_link=32e9,
        host=DESKTOP,
        sources=_sources(_GA102, _GA102, _PCIE_4, usable=_COMPILER),
    ),
    Chip(
        name="h100",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        compiler_name="NVIDIA H100 80GB HBM3",
        flops=_FLOPS_H100,
        memory_gb=80,
        usable_memory=84942979072,
        memory_bandwidth=3352e9,
        fast_link=_nvlink(4, 450e9, 8, _H100),
        host_link=64e9,
        host=DGX_H100,
        sources=_sources(_H100, _H100, _PCIE_5, usable=_COMPILER),
    ),
    Chip(
        name="h100-pcie",
        device_kinds=("NVIDIA H100 PCIe",),
        compiler_name="NVIDIA H100 PCIe",
        flops=_rates(756, 51.2, tf32=378, double=51.2, eight=1513),
        memory_gb=80,
        usable_memory=84942979072,
        memory_bandwidth=2039e9,
        fast_link=_nvlink(4, 300e9, 2, "NVIDIA H100 PCIe product brief (2022), with bridges"),
        host_link=64e9,
        sources=_sources(_H100, _H100, _PCIE_5, usable=_COMPILER),
    ),
    Chip(
        name="h200",
        device_kinds=("NVIDIA H200",),
        compiler_name="NVIDIA H200 141GB HBM3e",
        flops=_FLOPS_H100,
        memory_gb=141,
        usable_memory=151397597184,
        memory_bandwidth=4.8e12,
        fast_link=_nvlink(4, 450e9, 8, _H200),
        host_link=64e9,
        host=replace(DGX_H100, name="DGX H200"),
        sources=_sources(_H100 + ", of H100: the same GPU", _H200, _PCIE_5, usable=_COMPILER),
    ),
    Chip(
        name="b200",
        device_kinds=("NVIDIA B200",),
        compiler_name="NVIDIA B200",
        flops=_rates(2250, 75, tf32=1100, double=37, eight=4500),
        memory_gb=180,
        usable_memory=191514411008,
        memory_bandwidth=7672e9,
        fast_link=_nvlink(5, 900e9, 8, _B200),
        host_link=64e9,
        host=DGX_B200,
        sources=_sources(_B200, DGX_B200.source, _PCIE_5, usable=_COMPILER, bandwidth=_COMPILER),
    ),
    Chip(
        name="gb200",
        device_kinds=("NVIDIA GB200",),
        compiler_name="NVIDIA GB200",
        flops=_rates(2500, 80, tf32=1250, double=40, eight=5000),
        memory_gb=186,
        usable_memory=197897748480,
        memory_bandwidth=7928e9,
        fast_link=_nvlink(5, 900e9, 72, _GB200, rack=True),
        host_link=225e9,
        host=TRAY_GB200,
        sources=_sources(_GB200, _GB200, _C2C, usable=_COMPILER, bandwidth=_COMPILER),
    ),
    Chip(
        name="b300",
        device_kinds=("NVIDIA B300",),
        compiler_name="NVIDIA B300",
        flops=_rates(2250, 75, tf32=1100, eight=4500),
        memory_gb=288,
        usable_memory=297021865984,
        memory_bandwidth=7936e9,
        fast_link=_nvlink(5, 900e9, 8, _B300),
        host_link=64e9,
        host=DGX_B300,
        sources=_sources(_B300, _ULTRA, _PCIE_5, usable=_COMPILER, bandwidth=_COMPILER),
    ),
    Chip(
        name="gb300",
        device_kinds=("NVIDIA GB300",),
        compiler_name="NVIDIA GB300",
        flops=_rates(2500, 80, tf32=1250, eight=5000),
        memory_gb=288,
        usable_memory=297021079552,
        memory_bandwidth=7928e9,
        fast_link=_nvlink(5, 900e9, 72, _GB300, rack=True),
        host_link=225e9,
        host=TRAY_GB300,
        sources=_sources(_GB300, _ULTRA, _C2C, usable=_COMPILER, bandwidth=_COMPILER),
    ),
    Chip(
        name="rtx-pro-6000",
        device_kinds=(
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        ),
        compiler_name="NVIDIA RTX PRO 6000 Blackwell",
        flops=_rates(503.8, 125.9, tf32=251.9, double=1.97, eight=1007.6),
        memory_gb=96,
        usable_memory=103079215104,
        memory_bandwidth=1792e9,
        host_link=64e9,
        host=DESKTOP,
        sources=_sources(_PRO_6000, _PRO_6000, _PCIE_5, usable=_COMPILER),
    ),
    Chip(
        name="rtx4090",
        device_kinds=("NVIDIA GeForce RTX 4090",),
        compile_as="a6000",
        flops=_rates(165.2, 82.6, tf32=82.6, double=82.6 / 64, eight=330.3),
        memory_gb=24,
        memory_bandwidth=1008e9,
        host_link=32e9,
        host=DESKTOP,
        sources=_sources(_ADA, _ADA, _PCIE_4),
    ),
    Chip(
        name="rtx6000-ada",
        device_kinds=("NVIDIA RTX 6000 Ada Generation",),
        compile_as="a6000",
        flops=_rates(364.2, 91.1, tf32=182.1, double=91.1 / 64, eight=728.5),
        memory_gb=48,
        memory_bandwidth=960e9,
        host_link=32e9,
        host=DESKTOP,
        sources=_sources(_ADA, _ADA, _PCIE_4),
    ),
    Chip(
        name="l40s",
        device_kinds=("NVIDIA L40S",),
        compile_as="a6000",
        flops=_rates(366.5, 91.6, tf32=183, double=91.6 / 64, eight=733),
        memory_gb=48,
        memory_bandwidth=864e9,
        host_link=32e9,
        sources=_sources(_L40S, _L40S, _PCIE_4),
    ),
    Chip(
        name="l4",
        device_kinds=("NVIDIA L4",),
        compile_as="a6000",
        flops=_rates(121, 30.3, tf32=60, double=30.3 / 64, eight=242.5),
        memory_gb=24,
        memory_bandwidth=300e9,
        host_link=32e9,
        sources=_sources(_L4, _L4, _PCIE_4),
    ),
)


def _tpu(
    name: str,
    *kinds: str,
    flops: Mapping[str, float],
    memory: tuple[float, float],
    ici: tuple[float, int, str],
    host: tuple[int, float | None, float],
    host_link: float,
    network_source: str = _TPU,
) -> Chip:
    """A row of a TPU.

    Args:
        name: ours.
        kinds: as `Chip.device_kinds`.
        flops: as `Chip.flops`.
        memory: GB, and bytes/s.
        ici: bytes/s of one chip in one direction, chips of a pod, source.
        host: chips, bytes of memory, bytes/s of network.
        host_link: as `Chip.host_link`.
        network_source: for the host's figures.
    """
    bandwidth, pod, source = ici
    chips, ram, network = host
    return Chip(
        name=name,
        device_kinds=kinds,
        flops=flops,
        memory_gb=memory[0],
        memory_bandwidth=memory[1],
        fast_link=FastLink(
            name="ICI", bandwidth=bandwidth, chips=pod, between_hosts=True, source=source
        ),
        host_link=host_link,
        host=Host(
            name=f"host of {name}", chips=chips, memory=ram, network=network, source=network_source
        ),
        sources=_sources(_TPU, _TPU, _BOOK),
    )


_TPUS = (
    _tpu(
        "tpu-v4",
        "TPU v4",
        flops={"bfloat16": 275e12},
        memory=(32, 1200e9),
        ici=(6 * 50e9, 4096, "Jouppi et al. 2023, arXiv 2304.01433: 6 links of 50 GB/s"),
        host=(4, None, 4 * 6.25e9),
        host_link=16e9,
        network_source=_BOOK,
    ),
    _tpu(
        "tpu-v5e",
        "TPU v5 lite",
        "TPU v5e",
        flops={"bfloat16": 197e12},
        memory=(16, 819e9),
        ici=(200e9, 256, _TPU),
        host=(8, 512 * 2**30, 2 * 100e9 / 8),
        host_link=16e9,
    ),
    _tpu(
        "tpu-v5p",
        "TPU v5",
        "TPU v5p",
        flops={"bfloat16": 459e12, "float8": 459e12},
        memory=(95, 2765e9),
        ici=(600e9, 8960, _TPU),
        host=(4, 448e9, 4 * 50e9 / 8),
        host_link=16e9,
    ),
    _tpu(
        "tpu-v6e",
        "TPU v6 lite",
        "TPU v6e",
        flops={"bfloat16": 918e12},
        memory=(32, 1638e9),
        ici=(400e9, 256, _TPU),
        host=(8, 1536 * 2**30, 4 * 200e9 / 8),
        host_link=32e9,
    ),
)

_CPU = Chip(name="cpu", device_kinds=("cpu",))  # its figures are measured where it is
CHIPS: Final[Mapping[str, Chip]] = {chip.name: chip for chip in (*_GPUS, *_TPUS, _CPU)}
"""The table, by name."""

KNOWN_KINDS: Final[Mapping[str, Chip]] = {
    kind: chip for chip in CHIPS.values() for kind in chip.device_kinds
}
"""The table, by `jax.Device.device_kind`."""
