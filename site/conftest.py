"""The site, built once for all tests that need it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parent
sys.path.append(str(SITE))  # tests import the hook `computed`


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "out"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=SITE.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return out
