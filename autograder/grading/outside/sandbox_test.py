"""Start every backend of this machine for real and attack it from the inside."""

import json
import os
import resource
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from autograder.grading.outside import backends, sandbox
from autograder.grading.outside.sandbox import Limits, Mount, Sandbox, best_level, measure_start_s, survey

if sys.platform != "linux":
    pytest.skip("sandboxes exist on Linux only", allow_module_level=True)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CODE = [Mount(HERE.parent, "autograder/grading"), Mount(HERE.parents[1] / "__init__.py", "autograder/__init__.py")]
MARK = f"meshcraft-canary-{uuid.uuid4().hex}"


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def level(request):
    backend = next(each for each in survey() if each.name == request.param)
    if not backend.available:
        pytest.skip(f"{backend.name} does not work on this machine: {backend.reason}")
    return backend.name


def start(level, code, folder, *, limits=None, **env):
    """A sandbox that runs `code` as a module."""
    file = folder / f"probe_{uuid.uuid4().hex}.py"
    file.write_text("import os, sys, time\n" + textwrap.dedent(code))
    file.chmod(0o644)
    return Sandbox("probe", level=level, mounts=[Mount(file, "probe.py")], limits=limits, env=env)


def probe(level, name, **options):
    """A sandbox that runs one of the programs in `probes`."""
    return Sandbox(f"autograder.grading.outside.probes.{name}", level=level, mounts=CODE, **options)


def answer(box, timeout=30):
    """The probe's JSON output."""
    data = box.stdout.read()
    assert box.wait(timeout) == 0, box.stderr_tail
    return json.loads(data)


@pytest.fixture(scope="module")
def attempts(level, tmp_path_factory):
    """The attempts of an unfiltered process in a sandbox, with their outcomes."""
    folder = tmp_path_factory.mktemp("grader")
    (folder / "secret").write_text(MARK)
    home = Path.home() / f".{MARK}"
    home.write_text(MARK)
    question = {
        "files": [str(folder / "secret"), str(home), "/etc/shadow", "/etc/passwd", str(ROOT / "pyproject.toml")],
        "folders": [str(ROOT / "solutions"), str(ROOT / "autograder" / "chapters"), str(folder), "/home", "/var"],
        "places": ["/", "/usr", "/var/tmp", "/dev/shm", "/meshcraft", str(folder), str(ROOT), sys.prefix],
        "pid": os.getpid(),
    }
    os.environ["MESHCRAFT_CANARY"] = MARK
    leaked = os.open(folder / "secret", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    previous_folder = os.getcwd()
    os.chdir(folder)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, probe(level, "escape") as box:
            assert box.stdout.read(1) == b"\n", box.stderr_tail
            family = [box.pid, *map(int, Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split())]
            states = [Path(f"/proc/{pid}/status").read_text() for pid in family]
            box.stdin.write(json.dumps(question | {"port": server.getsockname()[1]}).encode() + b"\n")
            result = answer(box)
            result["uids"] = [uid for state in states for uid in state.partition("Uid:")[2].split()[:4]]
    finally:
        os.chdir(previous_folder)
        os.close(leaked)
        home.unlink()
        del os.environ["MESHCRAFT_CANARY"]
    return result


def test_nothing_outside_can_be_read(attempts):
    assert set(attempts["read"].values()) <= {"FileNotFoundError", "PermissionError"}
    for place, outcome in attempts["listed"].items():
        # Folders on the path to the course or to Python exist, with nothing else in them.
        roots = (Path(__file__).parents[3], Path(sys.prefix), Path(sys.base_prefix))
        below = (root.relative_to(place) for root in roots if root.is_relative_to(place) and root != Path(place))
        on_the_way = {path.parts[0] for path in below}
        assert outcome in ("FileNotFoundError", "PermissionError", str(sorted(on_the_way))), f"{place}: {outcome}"
    assert attempts["import"] in ("ModuleNotFoundError", "PermissionError")


def test_only_the_scratch_folder_can_be_written(attempts):
    assert attempts["scratch"] == "done"
    refused = {"FileNotFoundError", "PermissionError", "OSError"}
    for place, outcome in attempts["written"].items():
        # If Python is below /tmp, empty folders on the path to it belong to the sandbox's own /tmp.
        own = Path(place).is_relative_to("/tmp") and Path(sys.prefix).is_relative_to(place)
        assert outcome in refused or own, f"{place}: {outcome}"
        assert not Path(place, "meshcraft-was-here").exists()


def test_scratch_folder_has_quotas(attempts, level):
    assert attempts["bytes"] == "OSError"
    if level == "bubblewrap" and sandbox._own_tmp():  # otherwise an inode quota is impossible
        assert attempts["inodes"] == "OSError"


def test_environment_is_fixed_and_no_descriptor_is_inherited(attempts):
    assert attempts["fds"] == [0, 1, 2]
    assert MARK not in json.dumps(attempts["environment"])
    names = "PATH HOME TMPDIR LANG JAX_PLATFORMS PYTHONPATH PYTHONNOUSERSITE PYTHONDONTWRITEBYTECODE"
    ours = ("MESHCRAFT_ROOT", "MESHCRAFT_SCRATCH", "MESHCRAFT_LEVEL")
    assert attempts["environment"].keys() - {"PWD", "LC_CTYPE"} == {*names.split(), *ours}


def test_other_processes_the_network_and_root_are_out_of_reach(attempts, level):
    assert attempts["signal"] in ("ProcessLookupError", "PermissionError")
    assert "pytest" not in attempts["processes"]
    assert attempts["connect"] in ("ConnectionRefusedError", "PermissionError", "OSError")
    assert "0" not in attempts["uids"] or os.geteuid() != 0
    if level == "bubblewrap":
        assert (attempts["pid"], attempts["namespace"]) == (1, "CalledProcessError")


def test_jax_computes_on_8_devices_where_everything_else_is_refused(level):
    with probe(level, "strict") as box:
        result = answer(box)
    assert result.pop("psum") == 28.0
    assert result.pop("thread") == "ran"
    assert result.pop("io_uring") in ("Operation not permitted", "Function not implemented")
    assert {name: text for name, text in result.items() if text != "Operation not permitted"} == {}


def test_memory_bomb_stays_inside(level, tmp_path):
    with start(level, "bytearray(4 << 30)", tmp_path) as box:
        assert box.wait(10) != 0
        assert "MemoryError" in box.stderr_tail


def test_loop_is_ended_by_its_cpu_limit(level, tmp_path):
    code = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with start(level, code, tmp_path, limits=Limits(cpu_s=1, wall_s=None)) as box:
        assert box.wait(30) != 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 1 < after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5


def test_hang_is_ended_by_its_wall_limit_and_floods_are_cut(level, tmp_path):
    code = "sys.stderr.write('x' * 3_000_000); sys.stderr.flush(); time.sleep(60)"
    with start(level, code, tmp_path, limits=Limits(wall_s=1)) as box:
        box.wait(30)
    assert box.timed_out
    assert len(box.stderr_tail) == 64 << 10


def test_threads_are_limited(level, tmp_path):
    code = """
    import threading
    hold = threading.Event()
    count = 0
    try:
        for count in range(500):
            threading.Thread(target=hold.wait, daemon=True).start()
    except RuntimeError:
        pass
    print(count, flush=True)
    os._exit(0)
    """
    limits = Limits(processes=40)
    with start(level, code, tmp_path, limits=limits) as box:
        assert 20 <= answer(box) <= 40


def alive():
    """Processes left behind by a sandbox of this test run."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() in (process / "environ").read_bytes():
                pids.append(process.name)
        except OSError:
            continue
    return pids


def gone():
    end = time.monotonic() + 20
    while alive() and time.monotonic() < end:
        time.sleep(0.02)
    return not alive()


def test_no_process_outlives_its_sandbox(level, tmp_path):
    code = "os.fork(); os.fork(); print(1, flush=True); time.sleep(60)"
    with start(level, code, tmp_path, MARK=MARK) as box:
        box.stdout.read(2)
        assert len(alive()) >= 2
    assert gone()


def test_no_process_outlives_a_killed_grader(level, tmp_path):
    code = f"""
    import sys, time
    from autograder.grading.outside.sandbox import Sandbox
    command = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"]
    with Sandbox("", level={level!r}, env={{"MARK": {MARK!r}}}, command=command) as box:
        box.stdout.read(2)
        print(1, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as grader:
        assert grader.stdout and grader.stdout.read(2)
        assert alive()
        grader.kill()
    assert gone()


@pytest.fixture(scope="module")
def reports(level):
    """A zygote's report on each of its children."""
    with probe(level, "zygote", limits=Limits(cpu_s=None)) as box:
        return answer(box, 60)


def test_child_traces_a_program_for_8_devices_and_may_start_threads(reports):
    report = reports["shapes"]
    assert report["exit_status"] == 0, report["output"]
    assert report["result"] and report["denied"] == []
    assert (reports["thread"]["result"], reports["thread"]["denied"]) == ("ran", [])


def test_refused_system_calls_are_reported(reports):
    report = reports["reach"]
    assert (report["result"], report["exit_status"]) == ("done", 0)
    if not report["denials_reported"]:
        pytest.skip("this kernel does not report refused system calls")
    assert {"socket(AF_INET)", "socket(AF_UNIX)", "fork", "execve", "kill", "memfd_create"} <= set(report["denied"])


def test_hangs_and_floods_end_in_time(reports):
    for name, limit in {"storm": "wall time", "flood": "output", "closed": "wall time"}.items():
        assert reports[name]["exceeded"] == limit, name
        assert reports[name]["wall_s"] < 1.5, name
    assert reports["flood"]["output_dropped"] > 0
    assert len(reports["flood"]["output"]) == 64 << 10
    assert reports["busy"]["signal"] == 9
    assert reports["busy"]["cpu_s"] < 2.5


def test_faults_are_told_apart(reports):
    assert reports["crash"]["signal"] == 11
    assert (reports["leap"]["exit_status"], reports["leap"]["result"]) == (0, "")
    assert "MemoryError" in reports["greedy"]["output"]
    assert reports["long"]["exceeded"] == "result size"
    assert reports["error"]["exit_status"] == 1
    assert "hello" in reports["error"]["output"] and "ZeroDivisionError" in reports["error"]["output"]


def test_child_reaches_neither_its_zygote_nor_its_successor(reports):
    assert reports["memory"]["result"] == "refused"
    assert reports["leave"]["exit_status"] == 0, reports["leave"]["output"]
    assert reports["leave"]["clean"]
    assert reports["look"]["result"] == reports["ours"]
    assert reports["descriptors"]["result"] == "4"  # 0, 1, 2 and the result
    assert (reports["children"], reports["opened"]) == (0, 0)


def test_bare_start_is_measured(level):
    assert 0 < measure_start_s(level) < 10  # `make bench` prints it


def test_best_level_refuses_where_nothing_works(monkeypatch):
    missing = sandbox.Backend("bubblewrap", False, "bwrap is not installed", "Install bubblewrap")
    monkeypatch.setattr(sandbox, "survey", lambda: [missing])
    with pytest.raises(sandbox.SandboxUnavailable, match=r"bwrap is not installed(.|\n)*--unsafe-local"):
        best_level()
    assert best_level(allow_unsafe=True) == "unsafe-local"
    with pytest.raises(ValueError, match="relative path"):
        Mount(HERE, "../etc")


def test_installed_solutions_are_hidden(level, tmp_path, monkeypatch):
    place = f"{sysconfig.get_path('purelib')}/numpy"
    monkeypatch.setattr(backends, "_installed_copies", lambda: [place])
    code = f"""
    import jaxlib
    assert jaxlib.__file__
    try:
        open({place!r} + "/__init__.py").read()
    except OSError:
        print(1)
    """
    with start(level, code, tmp_path) as box:
        assert answer(box) == 1


def test_unsafe_local_still_has_limits(tmp_path):
    with start("unsafe-local", "time.sleep(60)", tmp_path, limits=Limits(wall_s=0.5)) as box:
        assert box.wait(5) == -9
    assert box.timed_out


@pytest.mark.parametrize(("kills", "works"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_backend_whose_trial_was_killed_is_tried_again_and_one_that_does_not_work_is_not(tmp_path, kills, works):
    tries = tmp_path / "tries"
    end = "echo confined" if kills else "echo no namespaces here >&2; exit 1"
    script = f"echo x >> {tries}; if [ $(wc -l < {tries}) -le {kills} ]; then kill -9 $$; fi; {end}"
    problem = sandbox._trial(lambda: backends.SandboxCommand(["sh", "-c", script], {**os.environ}, ()))
    assert (problem is None) == works, problem
    if not kills:
        assert problem == "no namespaces here" and tries.read_text() == "x\n"


def test_doctor_says_what_lets_bubblewrap_work_on_this_machine(tmp_path, monkeypatch):
    assert sandbox.allow_namespaces(tmp_path).endswith("sysctl, AppArmor or the settings of a container")
    for name, value in (("user/max_user_namespaces", "0"), ("kernel/apparmor_restrict_unprivileged_userns", "1")):
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True)
        path.write_text(f"{value}\n")
    (tmp_path / ".dockerenv").touch()
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    advice = sandbox.allow_namespaces(tmp_path)
    assert "`sysctl -w user.max_user_namespaces=10000`; `sysctl -w kernel.apparmor" in advice
    assert "--security-opt seccomp=unconfined" in advice and "SYS_ADMIN" not in advice
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 0)
    assert advice in sandbox.allow_namespaces(tmp_path) and "--cap-add SYS_ADMIN" in sandbox.allow_namespaces(tmp_path)
