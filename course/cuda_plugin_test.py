"""The course's processes write nothing to stderr when a CUDA plugin is installed without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOISE = "import os; os.write(2, b'no driver here\\n')\n"
SHOW = "import course, jax; print(len(jax.devices()), jax.devices()[0].platform)"


@pytest.fixture
def noisy(tmp_path):
    """A folder with packages that write to file descriptor 2 as the real plugin does."""
    for name in ("jax_cuda12_plugin/__init__.py", "jax_plugins/xla_cuda12/__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(NOISE + "def initialize(): raise RuntimeError('Unable to load CUDA')\n")
    return tmp_path


def start(folder, code, **environment):
    root = str(Path(__file__).parents[1])
    inherited = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "MESHCRAFT_MESH")}
    path = os.pathsep.join((root, str(folder)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("environment", [{}, {"JAX_PLATFORMS": "cpu"}])
def test_start_with_an_installed_plugin_is_silent_and_emulates_devices(noisy, environment):
    process = start(noisy, SHOW, **environment)
    assert (process.stdout, process.stderr) == ("8 cpu\n", "")


def test_real_devices_let_the_plugin_in(noisy):
    process = start(noisy, SHOW, MESHCRAFT_MESH="real")
    assert "no driver here" in process.stderr and process.stdout == "8 cpu\n"
