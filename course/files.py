"""Files that are replaced in one step."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that everyone finds its old content or the new one, also after a crash; several may write.

    A missing folder is made. A file that is replaced keeps its permissions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{secrets.token_hex(8)}.new")
    try:
        with new.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
