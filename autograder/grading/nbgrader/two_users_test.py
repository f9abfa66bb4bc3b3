"""JupyterHub's setup: two accounts on one machine, and nbgrader's exchange between them; only for root, and long."""

import json
import os
import pwd
import shutil
import subprocess
import sys

import pytest

# Accounts that every Linux machine has; nbgrader asks for the name.
TEACHER, STUDENT, OTHER = (pwd.getpwnam(name).pw_uid for name in ("daemon", "bin", "nobody"))
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not os.environ.get("MESHCRAFT_FULL"),
    reason="needs root, setpriv and MESHCRAFT_FULL=1",
)


def run(user, folder, *command):
    """Run a command as that user, who can write only their own files; this Python may be in a private folder."""
    rights = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    rights.append("--bounding-set=-all,+dac_read_search")
    setpriv = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *rights, "--"]
    env = {
        **os.environ,
        "HOME": str(folder),
        "USER": str(user),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run([*setpriv, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_a_student_fetches_submits_and_reads_feedback_and_reaches_no_other(tmp_path):
    private = next(folder for folder in tmp_path.parents if folder.name.startswith("pytest-of-"))
    for folder in (tmp_path, *(parent for parent in tmp_path.parents if parent.is_relative_to(private))):
        folder.chmod(0o755)
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    exchange.chmod(0o777)
    homes = {}
    for user in (TEACHER, STUDENT, OTHER):
        homes[user] = tmp_path / str(user)
        homes[user].mkdir(mode=0o700)
        os.chown(homes[user], user, user)
    nbgrader = (sys.executable, "-m", "nbgrader")
    course = homes[TEACHER] / "sharding"
    init = (sys.executable, "-m", "autograder.cli", "init", "sharding", "--chapter", "fsdp", "--exchange")
    run(TEACHER, homes[TEACHER], *init, str(exchange))
    run(TEACHER, course, *nbgrader, "release_assignment", "fsdp")
    for user in (STUDENT, OTHER):
        config = homes[user] / "nbgrader_config.py"
        text = f'c.CourseDirectory.course_id = "sharding"\nc.Exchange.root = {str(exchange)!r}\n'
        config.write_text(f"c = get_config()\n{text}")
    run(STUDENT, homes[STUDENT], *nbgrader, "fetch_assignment", "fsdp")
    run(STUDENT, homes[STUDENT], *nbgrader, "submit", "fsdp")
    run(TEACHER, course, *nbgrader, "collect", "fsdp")
    (handed_in,) = (course / "submitted").iterdir()
    assert (handed_in / "fsdp" / "fsdp.ipynb").is_file()
    (inbound,) = (exchange / "sharding" / "inbound").iterdir()
    assert inbound.stat().st_uid == STUDENT
    # Others can write there, under names that nobody can guess or list.
    assert inbound.parent.stat().st_mode & 0o007 == 0o003
    for target in (course / ".meshcraft" / "secret", exchange / "sharding" / "x"):
        says = run(OTHER, homes[OTHER], "sh", "-c", f"echo x > {target} || echo refused")
        assert "refused" in says, target
    assert json.loads((handed_in / "fsdp" / "fsdp.ipynb").read_text())["cells"]
