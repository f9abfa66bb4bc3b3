"""XLA's GPU target configuration, derived from ``Machine``: the deviceless GPU compiler's description of it."""

from __future__ import annotations

from course.machine import Machine
from course.program.program import ProgramError

# Required keys of ``Machine.compiler``; the rest follows from the compute capability or is the same for all.
KEYS = (
    "core_count",
    "clock_rate_ghz",
    "l2_cache_size",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "major",
    "minor",
)
# Threads and float32 lanes of one multiprocessor (CUDA C++ Programming Guide, table of technical specifications by
# compute capability, and its throughput table).
_BY_CAPABILITY = {
    (8, 0): (2048, 64),
    (8, 6): (1536, 128),
    (8, 7): (1536, 128),
    (8, 9): (1536, 128),
    (9, 0): (2048, 128),
    (10, 0): (2048, 128),
    (12, 0): (1536, 128),
}
# The same for every compute capability above, from the same table.
_ALL = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
}


def target_config(machine: Machine) -> str:
    """The text protobuf for ``jax.experimental.topologies.get_topology_desc``.

    Raises:
        ProgramError: The machine has no figures for the GPU compiler, or an unknown compute capability.
    """
    missing = [key for key in KEYS if key not in machine.compiler]
    if missing:
        raise ProgramError(
            f"machine {machine.name} cannot be compiled for: its `compiler` lacks {', '.join(missing)}. "
            "The compiled analysis supports NVIDIA GPUs; choose one, such as 8xH100"
        )
    figures = {key: machine.compiler[key] for key in KEYS}
    major, minor = int(figures.pop("major")), int(figures.pop("minor"))
    if (major, minor) not in _BY_CAPABILITY:
        known = ", ".join(f"{a}.{b}" for a, b in _BY_CAPABILITY)
        raise ProgramError(
            f"machine {machine.name} has compute capability {major}.{minor}, and those known are {known}; "
            "add its threads and lanes to course/program/compiled/target.py"
        )
    threads, lanes = _BY_CAPABILITY[major, minor]
    figures |= _ALL | {"threads_per_core_limit": threads, "fpus_per_core": machine.compiler.get("fpus_per_core", lanes)}
    figures |= {"memory_bandwidth": int(machine.memory_bandwidth), "device_memory_size": int(machine.memory_bytes)}
    figures_text = " ".join(f"{name}: {_number(value)}" for name, value in figures.items())
    return (
        f"gpu_device_info {{ {figures_text} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 1 }} device_description_str: "{machine.device}"\n'
    )


def _number(value: float) -> str:
    return repr(float(value)) if value != int(value) else str(int(value))
