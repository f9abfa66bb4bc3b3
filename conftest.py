"""Every test runs on 8 emulated devices, under strict dtype promotion; warnings are errors (pyproject.toml)."""

import atexit
import gc
import os
import re
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Most tests compute little, and compile for long; so do the notebooks and commands that they start.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads wait by spinning, on cores that others need

# What one process of this run has compiled, another need not: workers, executors, notebooks and examples share it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    shared = tempfile.mkdtemp(prefix="meshcraft-compiled-")
    atexit.register(shutil.rmtree, shared, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = shared
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# These two use the standard library's module `site`: before pytest calls our folder by that name.
import dask.config  # noqa: F401
import jax
import jupyter_core.paths  # noqa: F401

import course  # noqa: F401  emulates the devices

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Files whose tests have no fixture in common, and would keep one worker busy for minutes.
SHARE_NOTHING = {"autograder/release/exercise_test.py", "site/examples_test.py"}

gc.set_threshold(50_000, 20, 20)  # tracing makes many objects and few cycles; looking for them took a tenth of the time


def pytest_collection_modifyitems(items):
    """What takes long begins first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one worker, which makes their fixtures once; so do those of the site, built once.

    Those of a chapter's contract stay together for what the process keeps of its oracles.
    """
    from xdist.scheduler import LoadScopeScheduling

    from course.curriculum import CHAPTERS

    chapter = re.compile(rf"\b({'|'.join(entry.name for entry in CHAPTERS)})\b")
    config.option.loadscopereorder = False

    class ByChapterOrFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if file in SHARE_NOTHING:
                return nodeid
            found = chapter.search(nodeid) if file.startswith("autograder/chapters/") else None
            return found.group() if found else "site" if file.startswith("site/") else file

    return ByChapterOrFile(config, log)
