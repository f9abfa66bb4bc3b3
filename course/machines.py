"""The machines that programs are predicted for: published figures, each with its source.

Peaks are dense ones: where a maker's sheet counts 2:4 sparsity, half of it stands here. Bandwidths of links are one
way, so half of a figure that counts both. 1 GB is 10^9 bytes. An idealised machine has published peaks alone, and
efficiency factors of 1; ``8xH100-calibrated`` has measured tables in their place.
"""

from __future__ import annotations

from dataclasses import replace

from course.machine import Efficiency, Link, Machine, Table

_US = 1e-6

_SPECS = "XLA, xla/backends/gpu/target_config/specs/{}.txtpb (github.com/openxla/xla)"
_NCCL = "NCCL, src/graph/tuning.cc (github.com/NVIDIA/nccl)"
_TF32 = (
    "f32 is TensorFloat-32: JAX's default precision uses it on Ampere and newer "
    "(docs.jax.dev/en/latest/201/precision.html)"
)
_ONE_US = (
    "our assumption: 1 us for a step within a node, inside the range that NCCL plans with, 0.5 to 3.4 us for a step "
    f"of a ring over NVLink and 1.0 to 5.7 us over PCIe, by protocol ({_NCCL})"
)
_IDEAL = {
    "efficiency": "1: idealised, every peak is reached",
    "launch": "0: idealised, a kernel starts at no cost",
}
_A5000_SHEET = "NVIDIA RTX A5000 datasheet"
A5000 = Machine(
    name="8xA5000",
    device="NVIDIA RTX A5000",
    num_devices=8,
    matmul_flops={"bf16": 111.1e12, "f16": 111.1e12, "f32": 55.6e12},
    vector_flops=27.8e12,
    memory_bytes=24e9,
    memory_bandwidth=768e9,
    links=(Link("NVLink", 2, 56.25e9, 1 * _US), Link("PCIe", 8, 31.5e9, 1 * _US)),
    efficiency=Efficiency(matmul=0.6, memory=0.9),
    sources={
        "matmul_flops": f"{_A5000_SHEET}: 222.2 TFLOP/s with sparsity, half of it dense; f32 is half of bf16 on this "
        f"chip (NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix C). {_TF32}",
        "vector_flops": f"{_A5000_SHEET}: single precision",
        "memory_bytes": f"{_A5000_SHEET}: 24 GB GDDR6",
        "memory_bandwidth": f"{_A5000_SHEET}: 768 GB/s",
        "links": f"{_A5000_SHEET}: NVLink joins two, 112.5 GB/s both ways; PCI Express 4.0 x16 between the pairs, "
        "16 GT/s a lane with 128b/130b coding, 31.5 GB/s each way",
        "latency": _ONE_US,
        "efficiency": "ours: 0.6 of the matrix peak and 0.9 of the memory bandwidth, the same for every program; "
        "chosen so that timeline and replay together come nearest to the six step times that the UvA Deep Learning "
        "Tutorials (uvadlc-notebooks.readthedocs.io) publish for one A5000",
        "launch": _IDEAL["launch"],
        "compiler": "64 cores of 128 FPUs and 1.695 GHz by the datasheet's 8,192 CUDA cores and 27.8 TFLOP/s; the "
        f"rest as for the RTX A6000, the same chip: {_SPECS.format('a6000')}",
    },
    compiler={"core_count": 64, "fpus_per_core": 128, "clock_rate_ghz": 1.695, "l2_cache_size": 6291456,
              "shared_memory_per_core": 102400, "shared_memory_per_block_optin": 101376, "major": 8, "minor": 6},
)  # fmt: skip

_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet"
_A100_FILE = (
    "www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
A100 = Machine(
    name="8xA100",
    device="NVIDIA A100 SXM4 80GB",
    num_devices=8,
    matmul_flops={"bf16": 312e12, "f16": 312e12, "f32": 156e12},
    vector_flops=19.5e12,
    memory_bytes=80e9,
    memory_bandwidth=2.039e12,
    links=(Link("NVLink", 8, 300e9, 1 * _US),),
    sources={
        "matmul_flops": f"{_A100_SHEET} ({_A100_FILE}): tensor cores, without sparsity. {_TF32}",
        "vector_flops": f"{_A100_SHEET}: FP32",
        "memory_bytes": f"{_A100_SHEET}: 80 GB HBM2e",
        "memory_bandwidth": f"{_A100_SHEET}: 2,039 GB/s",
        "links": f"{_A100_SHEET}: NVLink 600 GB/s both ways, through NVSwitch between any two of the eight",
        "latency": _ONE_US,
        **_IDEAL,
        "compiler": _SPECS.format("a100_sxm_80"),
    },
    compiler={"core_count": 108, "fpus_per_core": 64, "clock_rate_ghz": 1.41, "l2_cache_size": 41943040,
              "shared_memory_per_core": 167936, "shared_memory_per_block_optin": 166912, "major": 8, "minor": 0},
)  # fmt: skip
TWO_A100 = replace(
    A100,
    name="2x8xA100",
    num_devices=16,
    links=(*A100.links, Link("InfiniBand", 16, 25e9, 4 * _US)),
    sources={
        **A100.sources,
        "links": f"{A100.sources['links']}; between the two nodes one HDR InfiniBand adapter of 200 Gb/s a GPU, as in "
        "DGX A100 (developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100)",
        "latency": f"{_ONE_US}; 4 us for a step between nodes, from the same file (ring, LL128)",
    },
)

_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet"
H100 = Machine(
    name="8xH100",
    device="NVIDIA H100 SXM5 80GB",
    num_devices=8,
    matmul_flops={"bf16": 989.4e12, "f16": 989.4e12, "f8": 1978.9e12, "f32": 494.7e12},
    vector_flops=66.9e12,
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    links=(Link("NVLink", 8, 450e9, 1 * _US),),
    sources={
        "matmul_flops": f"{_H100_PAPER}: SXM5, tensor cores, without sparsity. {_TF32}",
        "vector_flops": f"{_H100_PAPER}: SXM5, FP32 without tensor cores",
        "memory_bytes": f"{_H100_SHEET}: 80 GB HBM3",
        "memory_bandwidth": f"{_H100_SHEET}: 3.35 TB/s",
        "links": f"{_H100_SHEET}: NVLink 900 GB/s both ways, through NVSwitch between any two of the eight",
        "latency": _ONE_US,
        **_IDEAL,
        "compiler": _SPECS.format("h100_sxm"),
    },
    compiler={"core_count": 132, "fpus_per_core": 128, "clock_rate_ghz": 1.98, "l2_cache_size": 52428800,
              "shared_memory_per_core": 233472, "shared_memory_per_block_optin": 232448, "major": 9, "minor": 0},
)  # fmt: skip
_H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet"
H200 = replace(
    H100,
    name="8xH200",
    device="NVIDIA H200 SXM 141GB",
    memory_bytes=141e9,
    memory_bandwidth=4.8e12,
    sources={
        **H100.sources,
        "matmul_flops": f"{_H200_SHEET}: the H100's, to more digits in the {_H100_PAPER}. {_TF32}",
        "vector_flops": f"{_H200_SHEET}: the H100's, to more digits in the {_H100_PAPER}",
        "memory_bytes": f"{_H200_SHEET}: 141 GB HBM3e",
        "memory_bandwidth": f"{_H200_SHEET}: 4.8 TB/s",
        "links": f"{_H200_SHEET}: NVLink 900 GB/s both ways, through NVSwitch between any two of the eight",
        "compiler": _SPECS.format("h200"),
    },
)

# One node of eight H100: KiB of the whole array (of one device's block for a permute and an all-to-all), and XLA's
# throughput at that size in GB/s, which is the array over the time.
_MEASURED = {
    "all_gather": ((8, 0.1625), (32, 1.778), (128, 4.438), (256, 7.953), (1024, 33.68), (2048, 66.26), (4096, 88.98),
                   (8192, 128.9), (16384, 204.0), (32768, 259.4), (131072, 343.9), (262144, 368.1), (1048576, 393.3)),
    "reduce_scatter": ((8, 0.2777), (256, 9.174), (1024, 51.28), (4096, 117.7), (8192, 141.5), (16384, 193.8),
                       (32768, 251.3), (65536, 307.0), (131072, 326.2), (262144, 348.1), (1048576, 367.6)),
    "all_reduce": ((8, 0.2540), (64, 1.650), (256, 10.01), (2048, 36.61), (4096, 61.08), (8192, 80.12),
                   (16384, 115.5), (32768, 148.5), (131072, 200.3), (262144, 212.7), (1048576, 227.4)),
    "all_to_all": ((2, 0.05369), (64, 2.764), (256, 10.32), (2048, 83.59), (4096, 112.1), (16384, 158.9),
                   (32768, 253.2), (65536, 306.8), (131072, 325.3), (262144, 353.7), (1048576, 384.0)),
    "collective_permute": ((1, 0.09082), (8, 0.6403), (32, 2.500), (256, 9.752), (512, 13.07), (2048, 41.16),
                           (4096, 57.64), (16384, 70.53), (32768, 74.25), (131072, 144.4)),
}  # fmt: skip
# Of the array, what each of eight devices sends.
_SENT = {"all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_reduce": 14 / 8, "all_to_all": 7 / 8}


def _wire_rates() -> dict[str, Table]:
    return {
        kind: tuple((kib * 1024.0, _SENT.get(kind, 1) * gb * 1e9) for kib, gb in points)
        for kind, points in _MEASURED.items()
    }


_XLA_TABLES = (
    "XLA's performance tables for sm_90, xla/service/gpu/model/{}_interpolator_data.h (github.com/openxla/xla)"
)
H100_CALIBRATED = replace(
    H100,
    name="8xH100-calibrated",
    links=(replace(H100.links[0], rates=_wire_rates()),),
    matmul_rates=((2 * 1024**3, 253e12), (2 * 4096**3, 780e12)),
    sources={
        **H100.sources,
        "rates": f"{_XLA_TABLES.format('collective')}: collectives over all eight devices, and permutes round a ring; "
        f"smaller groups are taken to send at the same rates. {_XLA_TABLES.format('matmul')}: bfloat16 products of "
        "1024 and 4096 cubed; smaller ones are taken at the smaller one's rate, larger ones at the larger one's",
        "efficiency": "1: the measured tables contain the losses, and nothing is applied on top of them",
    },
)

_V5E_DOCS = "Google Cloud, TPU v5e (cloud.google.com/tpu/docs/v5e)"
TPU_V5E = Machine(
    name="8xTPUv5e",
    device="Google TPU v5e",
    num_devices=8,
    matmul_flops={"bf16": 197e12, "f32": 197e12},
    vector_flops=6.1e12,
    memory_bytes=16e9,
    memory_bandwidth=819e9,
    links=(Link("ICI", 8, 50e9, 1 * _US, two_way=True),),
    sources={
        "matmul_flops": f"{_V5E_DOCS}. f32 is computed in bfloat16: JAX's default precision on TPU "
        "(docs.jax.dev/en/latest/201/precision.html)",
        "vector_flops": "not published; 8 x 128 lanes of 4 units (How to Scale Your Model, for the v5p) at the 1.5 GHz "
        "that four 128 x 128 matrix units and their published peak give",
        "memory_bytes": f"{_V5E_DOCS}: 16 GB HBM2",
        "memory_bandwidth": f"{_V5E_DOCS}: 819 GB/s",
        "links": f"{_V5E_DOCS}: 400 GB/s a chip, both ways over four links, so 50 GB/s for one link one way. The eight "
        "chips are taken as one ring, round the edge of their 2 x 4 grid, and every axis as a ring of its own",
        "latency": "our assumption: 1 us for a step to a neighbour",
        **_IDEAL,
    },
)

# Compute alone takes time: what a schedule leaves idle is then all that is left to see. No program runs on it, so it
# stands in no list of machines.
FREE_NETWORK = Machine(
    name="free network",
    device="none: 1 TFLOP/s of matrix products, everything else at no cost",
    num_devices=64,
    matmul_flops={"bf16": 1e12, "f16": 1e12, "f32": 1e12},
    vector_flops=1e30,
    memory_bytes=1e12,
    memory_bandwidth=1e30,
    links=(Link("free", 64, 1e30, 0.0),),
)

MACHINES = (A5000, A100, TWO_A100, H100, H100_CALIBRATED, H200, TPU_V5E)


def machine(name: str) -> Machine:
    """The machine of that name, whatever its case.

    Raises:
        LookupError: There is none; the message lists those that exist.
    """
    for found in (*MACHINES, FREE_NETWORK):
        if found.name.lower() == name.lower():
            return found
    raise LookupError(f"no machine is called {name!r}; there are: {', '.join(m.name for m in MACHINES)}")
