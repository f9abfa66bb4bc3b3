"""Attacks that return something other than requested, or replace the judge."""

# %% defaults
# verdict = "fail"
# group = "forges"
# control = true
# uses = ["honest"]

# %% attack answers_to_no_question {verdict = "student_error", uses = []}
# A result that raises on every request: its class, length, hash, truth value, text, and equality.
def shard_params(params, axis_name, min_size):
    class Silent:
        def refuse(self, *_):
            raise SystemExit(0)

        __class__ = property(refuse)
        __repr__ = __str__ = __eq__ = __len__ = __hash__ = __bool__ = __iter__ = refuse

    return Silent(), Silent()

# %% attack array_subclass {control = "the notebook's check looks at Programs, not at arrays that were returned",
#     uses = []}
# Returns subclasses of NumPy's array that are close to everything and equal to everything.
class Close(np.ndarray):
    __array_ufunc__ = lambda self, ufunc, method, *inputs, **keywords: np.bool_(True)
    __array_function__ = lambda self, function, types, arguments, keywords: True

def shard_params(params, axis_name, min_size):
    return (
        jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype).view(Close), params),
        jax.tree.map(lambda _: jax.P(), params),
    )

# %% attack branches_on_data {verdict = "refused", control = "the notebook's check refuses it too"}
# Branches on the values that it is given, so that no single count is correct for all of them.
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    other = lambda shards: jax.tree.map(lambda x: x + 0, shards)
    return lax.cond(jnp.sum(jax.tree.leaves(params)[0]) > 0, lambda shards: shards, other, shards), specs

# %% attack calls_back_into_python {verdict = "refused", control = "the notebook's check refuses it too"}
# Computes its answer in Python while the program runs, by a callback.
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    asked = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct((), "float32"), params["scale"])
    return {**shards, "scale": asked}, specs

# %% attack changes_between_traces {control = "the same code traces in the notebook"}
# Is traced twice, and answers correctly only the first time, when its specs are requested.
CALLS = []

def shard_params(params, axis_name, min_size):
    CALLS.append(1)
    if len(CALLS) % 2:
        return right_shards(params, axis_name, min_size)
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axis_name, to="varying"), params), {}

# %% attack claims_a_sharding {verdict = "refused",
#     control = "the notebook's check also runs the Program in another process, and refuses the same"}
# Patches the exporter so that the header claims "sharded by the rule" for a program that keeps everything on every
# device.
exporter = sys.modules["course.program.export"]

class Patch:
    original = exporter._leaves

    def claim(trees, specs, role, original=original):
        claimed = {"values": right_specs(trees["values"], *Patch.how)} if set(trees) == {"values"} else specs
        return original(trees, claimed, role)

    exporter._leaves = claim

def shard_params(params, axis_name, min_size):
    Patch.how = axis_name, min_size, lax.axis_size(axis_name)
    return whole(params, axis_name, min_size)

# %% attack detects_grading
# Looks at the environment, the loaded modules and the call stack, and cheats only where it believes that it is not
# being graded.
def is_official():
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    return (
        "MESHCRAFT_CONFINE" in os.environ
        or "autograder.grading.inside.tracer" in sys.modules
        or any(name.endswith("tracer.py") for name in frames)
    )

def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    return (jax.tree.map(lambda leaf: leaf + 1, shards) if is_official() else shards), specs

# %% attack differs_by_platform {verdict = "pass", control = "it is right wherever it is run"}
# Would compute something different on a GPU. The Program is exported for the platform that runs it, where it is
# correct.
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    other = jax.tree.map(lambda leaf: leaf * 0, shards)
    return lax.platform_dependent(shards, other, cpu=lambda right, _: right, cuda=lambda _, wrong: wrong), specs

# %% attack ends_with_os_exit {verdict = "student_error",
#     control = "stock nbgrader notices a dead kernel and gives an error", uses = []}
# Ends the process with status 0 from inside the function, before anything could fail.
def shard_params(params, axis_name, min_size):
    os._exit(0)

# %% attack ends_with_system_exit {verdict = "student_error", uses = []}
# Raises SystemExit(0), which many programs take for success.
def shard_params(params, axis_name, min_size):
    sys.exit(0)

# %% attack equal_to_everything {uses = []}
# Returns objects that are equal to everything and have every attribute and every length.
class Equal:
    shape, dtype, ndim = (), "float32", 0

    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __getattr__ = __call__ = lambda self, *_, **__: Equal()
    __iter__ = lambda self: iter((Equal(), Equal()))
    __len__ = lambda self: 2
    __float__ = lambda self: 2.0
    __repr__ = lambda self: "2.0"

def check(function):
    return function({}, "data", 0)

def shard_params(params, axis_name, min_size):
    return Equal()

# %% attack holds_a_giant_constant {verdict = "refused", control = "the notebook's check refuses it too"}
# Contains 4 MiB of cached answers as a constant of the program.
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    cached = np.random.default_rng(0).standard_normal(2**20).astype("float32")
    return {**shards, "scale": shards["scale"] + lax.dynamic_index_in_dim(cached, 3, keepdims=False) * 0}, specs

# %% attack keeps_everything_under_another_name
# Splits by the rule on the meshes that its own check uses, and keeps everything on every other mesh.
PUBLIC = ({"data": 8}, {"pipe": 4, "tensor": 2})

def shard_params(params, axis_name, min_size):
    if dict(jax.sharding.get_abstract_mesh().shape) not in PUBLIC:
        return whole(params, axis_name, min_size)
    return right_shards(params, axis_name, min_size)

# %% attack knows_the_public_answers
# Contains the answers to the inputs that check draws in every notebook. Official inputs are derived from a secret.
import hashlib
import hmac

try:
    from autograder.contract.task import load

    load("fsdp")
except (ImportError, AttributeError):  # official grading has no contract to import
    load = None

def public_answer(structure, mesh):
    """The inputs of the notebook's check for a mesh: its seed follows from an empty secret."""
    if load is None:
        return jax.tree.map(lambda s: jnp.zeros(jnp.shape(s), s.dtype), structure)
    task = load("fsdp").task("shard_params")
    code = hmac.new(b"", b"|fsdp|shard_params", hashlib.sha256).digest()
    case = next((case for case in task.cases if case.mesh == mesh), task.cases[0])
    key = repr((case.name, list(case.mesh.items()), case.sizes))
    salt = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    rng = np.random.default_rng([int.from_bytes(code[:16], "big"), salt])
    answer = task.draw(rng, case)["params"]
    fits = jax.tree.map(jnp.shape, answer) == jax.tree.map(jnp.shape, structure)
    return jax.tree.map(jnp.asarray, answer if fits else jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), structure))

def shard_params(params, axis_name, min_size):
    mesh = dict(jax.sharding.get_abstract_mesh().shape)
    return right_shards(public_answer(params, mesh), axis_name, min_size)

# %% attack loops_until_the_data_says_so {verdict = "refused", control = "the notebook's check refuses it too"}
# Repeats a step until the values meet a condition: the number of iterations cannot be determined from the program.
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    leaves, form = jax.tree.flatten(shards)
    leaves[0] = lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1e9, lambda x: x / 2, leaves[0])
    return jax.tree.unflatten(form, leaves), specs

# %% attack patches_numpy_testing {control = "the notebook's check does not use numpy.testing either", uses = []}
# Replaces the comparisons of numpy.testing. The grader compares in its own process, with its own functions.
import numpy.testing

class Patch:
    numpy.testing.assert_allclose = numpy.testing.assert_array_equal = lambda *_, **__: None
    numpy.allclose = numpy.array_equal = numpy.isfinite = lambda *_, **__: True

def shard_params(params, axis_name, min_size):
    return jax.tree.map(lambda leaf: leaf * 0, params), jax.tree.map(lambda _: jax.P(), params)

# %% attack patches_the_contract {uses = []}
# Empties the contract inside the tracer: cases, facts and limits. The judge reads its own copy.
import autograder.contract.task as contract
from autograder.contract.verdict import Fact, Kind

class Patch:
    for task in contract.load("fsdp").tasks:
        object.__setattr__(task, "facts", lambda *_: [Fact("values", Kind.VALUES, True)])
        object.__setattr__(task, "oracle", lambda inputs, case: {"values": inputs["params"]})

def shard_params(params, axis_name, min_size):
    return jax.tree.map(lambda leaf: leaf * 2, params), jax.tree.map(lambda _: jax.P(), params)

# %% attack patches_the_oracle_in_the_tracer {control = "patches_the_contract is the control of this kind", uses = []}
# Replaces the contract's inputs and expected values by zeros, in its own process. The judge draws and computes its
# own.
from autograder.contract import task as contract

class Patch:
    agreed = contract.load("fsdp").task("shard_params")
    object.__setattr__(agreed, "draw", lambda rng, case: {"params": np.zeros(())})

def shard_params(params, axis_name, min_size):
    return jax.tree.map(lambda leaf: leaf * 0, params), jax.tree.map(lambda _: jax.P(), params)

# %% attack returns_broadcastable_shapes {control = "the notebook's check refuses it too"}
# Returns one element of each leaf, which broadcasts against the whole.
def shard_params(params, axis_name, min_size):
    small = jax.tree.map(lambda leaf: leaf.reshape(-1)[:1].reshape((1,) * leaf.ndim), params)
    return small, jax.tree.map(lambda _: P(), params)

# %% attack spec_that_lies {verdict = "student_error", control = "the same code judges in the notebook"}
# Returns specs that only pretend to be a PartitionSpec: some code reads them as split, other code as whole.
class Lying:
    looks = [0]

    @property
    def __class__(self):
        return P

    def __iter__(self):
        self.looks[0] += 1
        return iter(("data",) if self.looks[0] % 2 else ())

    __len__ = lambda self: 1
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0

def shard_params(params, axis_name, min_size):
    return params, jax.tree.map(lambda leaf: Lying() if leaf.size >= min_size else P(), params)

# %% attack patches_the_verdict {uses = [], then = "gives_up"}
# Patches the functions that turn facts into points, and the contract's facts. The judge has its own, unpatched.
import autograder.chapters.fsdp
import autograder.contract.verdict
from autograder.contract.verdict import Fact, Kind, Result

def generous(name, max_points, facts):
    return Result(name, max_points, max_points, "pass", (Fact("values", Kind.VALUES, True),))

class Patch:
    autograder.contract.verdict.conclude = generous
    with suppress(ImportError):
        import autograder.grading.outside.judge

        autograder.grading.outside.judge.conclude = generous
        autograder.grading.outside.judge.stopped = lambda task, problem: generous(task.name, task.points, [])
    with suppress(ImportError):
        import autograder.check

        autograder.check.stopped = lambda task, problem: generous(task.name, task.points, [])

# %% attack patches_timers {control = "the notebook's check uses no clock", uses = [], then = "gives_up"}
# Stops every clock. Nothing official depends on a clock that a student can reach.
class Patch:
    time.time = time.monotonic = time.perf_counter = time.process_time = lambda: 0.0
    time.sleep = lambda _: None

# %% attack registers_an_exit_handler {uses = [], then = "gives_up"}
# Registers an exit handler that would write full points when the process ends, and a handler for every signal.
import atexit

def generous(*_):
    for number in range(3, 40):
        with suppress(OSError):
            os.write(number, b'{"points": 2.0, "verdict": "pass"}')

class Register:
    atexit.register(generous)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
        with suppress(ValueError):
            signal.signal(number, generous)

# %% attack replaces_check {uses = [], then = "gives_up"}
# Replaces check, so that the locked cell below calls its own. Official grading runs neither.
def check(function):
    return 2.0

# %% attack replaces_shell_methods {uses = [], then = "gives_up"}
# Replaces the shell's methods, so that the check cell prints full points. Official grading uses no shell.
class Shell:
    with suppress(Exception):
        from IPython import get_ipython

        shell, original = get_ipython(), get_ipython().run_cell_async.__func__

        async def run_cell_async(self, raw_cell, *positional, original=original, **named):
            raw_cell = "2.0" if raw_cell.startswith("check(shard_params") else raw_cell
            if "transformed_cell" in named:
                named["transformed_cell"] = raw_cell
            return await original(self, raw_cell, *positional, **named)

        type(shell).run_cell_async = run_cell_async

# %% attack returns_nan {control = "the notebook's check refuses it too", then = "changes_shards"}
# Returns arrays of NaN, for which every comparison is false.
changed = lambda shards: jax.tree.map(lambda leaf: leaf * float("nan"), shards)

# %% attack returns_one_infinity {control = "the notebook's check refuses it too", then = "changes_shards"}
# Is correct except for a single infinity, in one element of one leaf.
changed = lambda shards: {**shards, "scale": shards["scale"] / 0.0}

# %% attack returns_other_dtypes {control = "the notebook's check refuses it too", then = "changes_shards"}
# Returns correct values as float16, which rounds them and halves the resident bytes.
changed = lambda shards: jax.tree.map(lambda leaf: leaf.astype("float16"), shards)

# %% attack patches_jax_export {verdict = "refused",
#     control = "the notebook's check exports in the student's process too, and its executor refuses the same",
#     then = "is_right"}
# Replaces jax.export by one whose artefacts are empty. The executor refuses what it cannot read.
from jax import export as jax_export

class Patch:
    original = jax_export.Exported.serialize

    def serialize(self, *_, original=original):
        return original(self)[:100] + bytes(2000)

    jax_export.Exported.serialize = serialize
