"""Pin what the course installs in constraints.txt: newest versions for the oldest and the newest Python found here."""

import re
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
# The oldest patch release that the course installs on, from Debian 12. Packages that need a newer one get two lines.
OLDEST, NEEDS = "3.11.2", re.compile(r"^Requires-Python: >=(3\.11\.[3-9]|3\.11\.\d\d)", re.MULTILINE)


PATCHED: dict[str, tuple[str, str]] = {}  # by package: the patch release it needs, and the version for older ones


def python(versions: list[str]) -> str:
    """Path of the first of these Pythons that is installed, on the PATH or under pyenv."""
    for version in versions:
        on_path = shutil.which(f"python{version}")
        in_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        if on_path or in_pyenv:
            return on_path or str(in_pyenv[-1])
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
        for path in Path(folder).glob("lib/python3.11/site-packages/*.dist-info/METADATA"):
            if match := NEEDS.search(path.read_text(errors="replace")):
                name = re.search(r"^Name: (.*)$", path.read_text(errors="replace"), re.MULTILINE)
                assert name
                PATCHED[name[1].lower()] = (match[1], older(name[1], folder))
    return dict(line.split("==") for line in frozen.stdout.split() if "==" in line)


def older(name: str, folder: str) -> str:
    """The newest version of a package that installs on ``OLDEST``."""
    place = Path(folder) / "older"
    options = ["--python-version", OLDEST, "--only-binary=:all:", "--no-deps", "-d", str(place), name]
    subprocess.run([f"{folder}/bin/python", "-m", "pip", "-q", "download", *options], check=True)
    stem = name.lower().replace("-", "_")
    return next(path.name.split("-")[1] for path in place.iterdir() if path.name.lower().startswith(f"{stem}-"))


def main() -> None:
    old, new = (installed(python(versions)) for versions in (["3.11"], ["3.14", "3.13", "3.12"]))
    lines = []
    for name in sorted({*old, *new}, key=str.lower):
        if name.lower() in PATCHED and old.get(name) == new.get(name):
            needs, version = PATCHED[name.lower()]
            lines.append(f'{name}=={version}; python_full_version < "{needs}"')
            lines.append(f'{name}=={old[name]}; python_full_version >= "{needs}"')
        elif old.get(name) == new.get(name):
            lines.append(f"{name}=={old[name]}")
        else:
            lines += [f'{name}=={old[name]}; python_version < "3.12"'] if name in old else []
            lines += [f'{name}=={new[name]}; python_version >= "3.12"'] if name in new else []
    (HERE / "constraints.txt").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
