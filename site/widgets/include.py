"""MkDocs hook: add scripts and styles of the widgets to the site, under ``widgets/``, and the machines' figures."""

import json
from pathlib import Path

from mkdocs.structure.files import File

from course.machines import MACHINES

FOLDER = Path(__file__).parent


def figures() -> dict[str, dict]:
    """Rates and latencies of each idealised machine within one node, as its model gives them, for a script.

    ``gather`` has the latency and the rate of a large all-gather by the number of devices, ``permute`` those of a
    transfer to a neighbour. Rates are per second, in FLOPs or bytes.
    """
    rates = {}
    for machine in MACHINES:
        if machine.calibrated or machine.name in ("2x8xA100", "8xH100-sharp"):
            continue
        sizes = [n for n in (2, 4, 8, 16, 32, 64) if n <= machine.num_devices]
        rates[machine.name] = {
            "device": machine.device,
            "flops": machine.efficiency.matmul * machine.peak("bf16"),
            "memory": machine.efficiency.memory * machine.memory_bandwidth,
            "gather": {n: machine.transfer("all_gather", tuple(range(n)), 1e9, 1e9) for n in sizes},
            "permute": {n: machine.transfer("collective_permute", tuple(range(n)), 1e9, 1e9) for n in sizes},
        }
    return rates


def on_files(files, config, **_):
    """Add every script and style sheet in this folder, and the machines' figures as a script."""
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in (".js", ".css"):
            files.append(File.generated(config, f"widgets/{path.name}", abs_src_path=str(path)))
    script = f"window.meshcraftMachines = {json.dumps(figures())};\n"
    files.append(File.generated(config, "widgets/machines.js", content=script))
    return files
