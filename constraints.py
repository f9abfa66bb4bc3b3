"""Pin what the course installs in constraints.txt: newest versions for the oldest and the newest Python found here."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = """\
# Exact versions of everything that is installed. Python 3.11 gets jax 0.10, newer Pythons jax 0.12.
# Renew: make constraints
"""
HERE = Path(__file__).resolve().parent


def python(versions: list[str]) -> str:
    """Path of the first of these Pythons that is installed, on the PATH or under pyenv."""
    for version in versions:
        found = shutil.which(f"python{version}")
        below = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        if found or below:
            return found or str(below[-1])
    sys.exit(f"none of Python {', '.join(versions)} was found")


def installed(interpreter: str) -> dict[str, str]:
    """Versions that a fresh environment of this Python installs, by package name."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", f"{HERE}[dev,site]"], check=True, cwd=folder)
        # This is the only package of the GPU compiler whose version does not follow jax's.
        subprocess.run([*pip, "install", "-q", "--no-deps", "nvidia-cuda-nvcc-cu12"], check=True)
        frozen = subprocess.run([*pip, "freeze", "--exclude", "meshcraft"], check=True, capture_output=True, text=True)
    return dict(line.split("==") for line in frozen.stdout.split() if "==" in line)


def main() -> None:
    old, new = (installed(python(versions)) for versions in (["3.11"], ["3.14", "3.13", "3.12"]))
    lines = []
    for name in sorted({*old, *new}, key=str.lower):
        if old.get(name) == new.get(name):
            lines.append(f"{name}=={old[name]}")
            continue
        if name in old:
            lines.append(f'{name}=={old[name]}; python_version < "3.12"')
        if name in new:
            lines.append(f'{name}=={new[name]}; python_version >= "3.12"')
    (HERE / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
