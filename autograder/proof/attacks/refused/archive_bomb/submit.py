"""A zip bomb under the notebook's name; it is not unpacked, and it is no notebook.

group: exhausts
control: no: nbgrader reads JSON alone
"""

from __future__ import annotations

import zipfile
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    with zipfile.ZipFile(folder / released.name, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.writestr(f"{number}.ipynb", bytes(10**7))
