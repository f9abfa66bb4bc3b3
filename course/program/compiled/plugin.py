"""Location of the deviceless GPU compiler: the packages of the extra ``aot``, in a separate folder or in this venv.

If it is installed with the course's packages, the plugin makes every ``import jax`` write to stderr, so a folder that
only the compiled analysis's process sees is preferable: ``MESHCRAFT_AOT``, or ``aot`` inside the virtual environment.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import jaxlib

PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
# Their version must match that of jaxlib exactly.
VERSIONED = PACKAGES[:2]


class AotMissing(RuntimeError):
    """Raised when the deviceless GPU compiler cannot be used here; the message says why and what to do."""


@dataclass(frozen=True)
class Plugin:
    """Location of the packages.

    Attributes:
        folder: Added to the worker's path; None if the packages are in this virtual environment.
        versions: Version of each package.
    """

    folder: Path | None
    versions: dict[str, str]


def own_folder() -> Path:
    """The folder for the packages, separate from the course's own."""
    named = os.environ.get("MESHCRAFT_AOT")
    return Path(named) if named else Path(sys.prefix) / "aot"


def find_plugin() -> Plugin:
    """The packages of the extra, in their own folder or else in this environment.

    Raises:
        AotMissing: The platform has no wheel, they are not installed, or they are for another jax.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise AotMissing(
            f"the GPU compiler has wheels for Linux on x86_64 and aarch64, and this is {sys.platform} on "
            f"{platform.machine()}; the other analyses do not need it"
        )
    folder = own_folder()
    for place in (folder, None):
        versions = _versions(place)
        if all(package in versions for package in PACKAGES):
            _check_versions(versions)
            return Plugin(place, versions)
    raise AotMissing(f"the GPU compiler is not installed (220 MB). Install it with:\n  {install_command()}")


def install_command() -> str:
    """The command that installs the right versions into a separate folder."""
    return " ".join(_install())


def _install() -> list[str]:
    requirements = [f"{package}=={jaxlib.__version__}" if package in VERSIONED else package for package in PACKAGES]
    options = ["--quiet", "--disable-pip-version-check", "--upgrade", "--no-deps", "--target", str(own_folder())]
    pins = Path(__file__).parents[3] / "constraints.txt"
    return [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        *(["-c", str(pins)] if pins.exists() else []),
        *requirements,
    ]


def main() -> int:
    """Install the packages unless they are present; if that is impossible, print why and continue without them."""
    try:
        plugin = find_plugin()
        print(f"XLA's GPU compiler {plugin.versions[PACKAGES[0]]} is in {plugin.folder or 'this environment'}")
        return 0
    except AotMissing as error:
        if "not installed" not in str(error) and "Install it again" not in str(error):
            print(error)
            return 0
    print("installing XLA's GPU compiler for the compiled analysis (220 MB, once)", flush=True)
    if subprocess.run(_install(), capture_output=True).returncode:
        print("it could not be installed; results of the compiled analysis will read 'not measured'")
        return 0
    print(f"installed in {own_folder()}")
    return 0


def _versions(folder: Path | None) -> dict[str, str]:
    """Versions of the installed packages."""
    versions = {}
    for package in PACKAGES:
        for distribution in distributions(name=package, path=[str(folder)] if folder else sys.path):
            versions.setdefault(package, distribution.version)
    return versions


def _check_versions(versions: dict[str, str]) -> None:
    for package in VERSIONED:
        if versions[package] != jaxlib.__version__:
            raise AotMissing(
                f"{package} {versions[package]} is installed and jaxlib is {jaxlib.__version__}; they must be "
                f"the same. Install it again with:\n  {install_command()}"
            )
