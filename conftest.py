"""Every test runs on 8 emulated devices, under strict dtype promotion; warnings are errors (pyproject.toml)."""

import atexit
import gc
import os
import re
import shutil
import signal
import tempfile

# A shell makes background jobs ignore Ctrl-C, and the processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["JAX_PLATFORMS"] = "cpu"
# Most tests compute little and spend their time compiling, as do the notebooks and commands they start.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads spin while they wait, on cores that others need

# Share compilation results between the processes of one run: workers, executors, notebooks and examples.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    shared = tempfile.mkdtemp(prefix="meshcraft-compiled-")
    atexit.register(shutil.rmtree, shared, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = shared
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# These two import the standard library's `site`, so load them before pytest imports our folder of that name.
import dask.config  # noqa: F401
import jax
import jupyter_core.paths  # noqa: F401
import pytest

import course  # noqa: F401  emulates the devices

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Files whose tests share no fixtures and would keep one worker busy for minutes.
SHARE_NOTHING = {
    "autograder/proof/mistakes/mistakes_test.py",
    "autograder/release/exercise_test.py",
    "site/examples_test.py",
}

gc.set_threshold(50_000, 20, 20)  # tracing makes many objects and few cycles; collecting them took a tenth of the time


def leaves_out_long_tests(config):
    """True unless all tests are asked for, or a marker, or a file by its name."""
    named = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    return not (os.environ.get("MESHCRAFT_FULL") or config.option.markexpr or named)


def pytest_collection_modifyitems(config, items):
    """Leave out the long tests, or run them first, so that no worker is left with one at the end."""
    for item in items:
        if "built" in item.fixturenames:  # it takes minutes to build the site
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if leaves_out_long_tests(config):
        items[:] = [item for item in items if item.get_closest_marker("long") is None]


def pytest_terminal_summary(terminalreporter, config):
    if leaves_out_long_tests(config):
        terminalreporter.write_line("The long tests did not run: `make test-long` runs them.")


def pytest_xdist_make_scheduler(config, log):
    """Run each file's tests in one worker, so that its fixtures are built once; likewise all tests of the site.

    Tests of one chapter's contract stay together, because the process caches the chapter's oracles; but not all mutants
    and alternatives on every mesh, which keep every worker busy.
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
            if match := chapter.search(nodeid) if file.startswith("autograder/chapters/") else None:
                return nodeid if os.environ.get("MESHCRAFT_FULL") else match.group()
            return "site" if file.startswith("site/") else file

    return ByChapterOrFile(config, log)
