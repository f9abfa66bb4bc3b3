"""Attacks that modify the components of grading: files, processes, the next function."""

# %% defaults
# verdict = "pass"
# group = "tampers"
# control = "would harm the machine"

# %% attack deep_folders_left_behind {uses = ["honest"]}
# Leaves 500 nested folders, locked and with long names, in the next submission's scratch folder; they are wiped.
def shard_params(params, axis_name, min_size):
    os.chdir(tempfile.gettempdir())
    for _ in range(500):
        name = "d" * 200
        with suppress(FileExistsError):
            os.mkdir(name)
        os.chdir(name)
        with suppress(OSError):
            os.chmod("..", 0o300)
    os.chdir("/")
    return right_shards(params, axis_name, min_size)

# %% attack kills_everything {verdict = "student_error"}
# Sends SIGKILL to its parent, its group and every process; each signal is refused and reported.
def shard_params(params, axis_name, min_size):
    left = []
    for target in (os.getppid(), 0, -1, 1):
        try:
            os.kill(target, signal.SIGKILL)
        except OSError:
            left.append(target)
    if len(left) < 4:
        return None
    raise PermissionError("all still run")

# %% attack leaves_a_process {verdict = "student_error", control = "leaves processes"}
# Forks twice and starts its own session, to outlive grading; the first fork is refused.
import subprocess

def shard_params(params, axis_name, min_size):
    sleep = ["/bin/sleep", "1000"]
    for start in (os.fork, lambda: subprocess.Popen(sleep), lambda: os.posix_spawn(sleep[0], sleep, {})):
        try:
            start()
        except OSError:
            continue
        return None
    os.setsid()

# %% attack leaves_threads {control = "never ends", uses = ["honest"]}
# Starts threads that never end and are joined at exit; they end with the fork, and the answer counts.
def shard_params(params, axis_name, min_size):
    for daemon in (True, False):
        threading.Thread(target=time.sleep, args=(10**6,), daemon=daemon).start()
    return right_shards(params, axis_name, min_size)

# %% attack plants_startup_files {uses = ["honest", "honest_loss"]}
# Writes start-up files, modules and markers wherever it can for the next process to import; the next function finds
# none of them.
import site

NAMES = ("sitecustomize.py", "usercustomize.py", "numpy.py", "planted.pth", ".bashrc")

class Planted:
    places = [os.path.expanduser("~"), tempfile.gettempdir(), os.getcwd(), site.getusersitepackages(), *sys.path]
    places += [*site.getsitepackages(), "/etc", "/usr/lib", "/var/tmp", "/dev/shm", "/meshcraft/course", "/run"]
    found = [place for place in places if os.path.exists(os.path.join(place or ".", NAMES[0]))]

def shard_params(params, axis_name, min_size):
    for place in Planted.places:
        for name in NAMES:
            with suppress(OSError):
                os.makedirs(place or ".", exist_ok=True)
                with open(os.path.join(place or ".", name), "w") as file:
                    file.write("raise SystemExit('planted')")
    return right_shards(params, axis_name, min_size)

def gather_params(shards, specs, axis_name):
    if Planted.found:
        raise RuntimeError(f"planted before: {Planted.found}")

    return join(shards, specs, axis_name)

# %% attack poisons_the_next_function {control = true, functions = ["gather_params"], uses = ["honest", "honest_loss"]}
# Replaces the tracer's functions, its limits and JAX's caches in memory; the next function starts from a fresh fork.
def shard_params(params, axis_name, min_size):
    sys.modules["course"].poisoned = True
    for kept in gc.get_objects():
        if isinstance(kept, dict) and "fork_confined" in kept:
            kept["fork_confined"] = kept["load"] = None
    lax.all_gather = None
    return right_shards(params, axis_name, min_size)

def gather_params(shards, specs, axis_name):
    if hasattr(sys.modules["course"], "poisoned"):
        raise RuntimeError("what another function did is still there")

    return join(shards, specs, axis_name)

# %% attack writes_course_files {control = "it would rewrite the installed course", uses = ["honest"]}
# Opens the course, the grader, Python's libraries and their caches for writing, by every path; all are read-only.
import importlib.util

import course

def shard_params(params, axis_name, min_size):
    paths = [
        course.__file__,
        os.__file__,
        jax.__file__,
        sys.executable,
        importlib.util.cache_from_source(course.__file__),
    ]
    paths += [f"/proc/self/root{path}" for path in paths] + [f"/proc/self/cwd/../{path}" for path in paths]
    for path in paths:
        for flags in (os.O_WRONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_CREAT):
            try:
                os.open(path, flags)
            except OSError:
                continue
            raise RuntimeError(f"{path} can be written")
        try:
            os.rename(path, f"{path}.old")
        except OSError:
            continue
        raise RuntimeError(f"{path} can be renamed")
    return right_shards(params, axis_name, min_size)

# %% attack writes_other_processes {control = true, uses = ["honest"]}
# Opens the memory and descriptors of its parent and of process 1 for writing; all attempts fail.
def shard_params(params, axis_name, min_size):
    for process in (os.getppid(), 1, "self/task/../../1"):
        files = [f"/proc/{process}/{name}" for name in ("mem", "oom_score_adj", "comm", "clear_refs", "timers")]
        files += [f"/proc/{process}/fd/{number}" for number in range(20)]
        for file in files:
            try:
                os.open(file, os.O_WRONLY)
            except OSError:
                continue
            raise RuntimeError(f"{file} can be written")
    return right_shards(params, axis_name, min_size)
