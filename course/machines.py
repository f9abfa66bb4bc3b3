"""The machines that programs are predicted for: published figures, each with its source."""

from __future__ import annotations

from course.machine import Efficiency, Link, Machine

_US = 1e-6
_H100_COMPILER = {"core_count": 132, "clock_rate_ghz": 1.98, "l2_cache_size": 52428800, "shared_memory_per_core": 233472,
                  "shared_memory_per_block_optin": 232448, "major": 9, "minor": 0}  # fmt: skip

H100 = Machine(
    name="8xH100",
    device="NVIDIA H100 SXM5 80GB",
    num_devices=8,
    matmul_flops={"bf16": 989.4e12, "f16": 989.4e12, "f8": 1978.9e12, "f32": 494.7e12},
    vector_flops=66.9e12,
    memory_bytes=80e9,
    memory_bandwidth=3.35e12,
    links=(Link("NVLink", 8, 450e9, 1 * _US),),
    compiler=_H100_COMPILER,
)
A5000 = Machine(
    name="8xA5000",
    device="NVIDIA RTX A5000",
    num_devices=8,
    matmul_flops={"bf16": 111.1e12, "f16": 111.1e12, "f32": 55.6e12},
    vector_flops=27.8e12,
    memory_bytes=24e9,
    memory_bandwidth=768e9,
    links=(Link("NVLink", 2, 56.25e9, 1 * _US), Link("PCIe", 8, 25e9, 1 * _US)),
    efficiency=Efficiency(matmul=0.7, memory=0.9),
    compiler={"core_count": 64, "clock_rate_ghz": 1.695, "l2_cache_size": 6291456, "shared_memory_per_core": 102400,
              "shared_memory_per_block_optin": 101376, "major": 8, "minor": 6},
)  # fmt: skip

MACHINES = (A5000, H100)


def machine(name: str) -> Machine:
    """The machine of that name, whatever its case.

    Raises:
        LookupError: There is none; the message lists those that exist.
    """
    for found in MACHINES:
        if found.name.lower() == name.lower():
            return found
    raise LookupError(f"no machine is called {name!r}; there are: {', '.join(m.name for m in MACHINES)}")
