"""Run the suite as a plain user if root starts it: files in root's private home are made visible to it, unchanged.

If Python is below a folder that only root may enter, that folder is covered by an empty one, in a mount namespace
that ends with the command, and Python's own folders are mounted back into it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from autograder.grading.outside.backends import _python_folders, tool
from course.curriculum import ROOT

USER = 1000


def run_as_plain_user(arguments: list[str]) -> dict[str, Any]:
    """Run ``python -m autograder.proof.attacks`` as the plain user, and parse the JSON that it prints.

    Raises:
        RuntimeError: it printed none.
    """
    become = [tool("setpriv"), f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]
    command = [*become, sys.executable, "-m", "autograder.proof.attacks", *arguments]
    script = "\n".join(["set -e", *_shown(), shlex.join(["exec", *command])])
    done = subprocess.run(
        [tool("unshare"), "--mount", "--propagation", "private", "/bin/sh", "-c", script],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"as a plain user it ended with status {done.returncode} and no result") from None


def _shown() -> list[str]:
    """Commands that make every required folder reachable: a private parent is covered, the folder mounted back."""
    needed = [os.path.realpath(path) for path in (*_python_folders(), str(ROOT))]
    private: dict[str, list[str]] = {}
    for path in dict.fromkeys(needed):
        cover = next((str(p) for p in [*reversed(Path(path).parents)] if not p.stat().st_mode & 0o001), None)
        if cover:
            private.setdefault(cover, []).append(path)
    lines = []
    for cover, paths in private.items():
        # Bind them to a folder outside first, because the cover would hide them.
        stage = "/mnt"
        lines.append(f"mount -t tmpfs -o mode=755 meshcraft {stage}")
        for number, path in enumerate(paths):
            lines += [f"mkdir {stage}/{number}", f"mount --bind {shlex.quote(path)} {stage}/{number}"]
        lines.append(f"mount -t tmpfs -o mode=755 meshcraft {shlex.quote(cover)}")
        for number, path in enumerate(paths):
            lines += [f"mkdir -p {shlex.quote(path)}", f"mount --bind {stage}/{number} {shlex.quote(path)}"]
        lines.append(f"umount -R {stage}")
    return lines
