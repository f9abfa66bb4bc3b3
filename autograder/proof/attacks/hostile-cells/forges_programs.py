"""Attacks that write messages and Programs by hand, into the only pipe of a student's process."""

# %% defaults
# verdict = "refused"
# group = "forges"
# control = "stock nbgrader has no such channel"
# uses = ["honest", "forge"]
# functions = ["shard_params"]

# %% helper forge
# Write to the result channel by hand, through the only pipe of a student's process.
import stat

def request():
    """What the tracer was asked, from the frames that run this notebook; None where nobody grades."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("header")
        if isinstance(found, dict) and "cases" in found:
            return found
        frame = frame.f_back
    return None

def channel():
    """The only pipe besides standard output and error."""
    for number in range(3, 256):
        with suppress(OSError):
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                return number

def say(header, blobs=()):
    """Write one message and end the process before the tracer can write its own."""
    from autograder.grading.inside import wire

    with os.fdopen(channel(), "wb") as pipe:
        wire.write(pipe, header, list(blobs))
    os._exit(0)

def say_raw(data):
    with os.fdopen(channel(), "wb") as pipe:
        pipe.write(data)
    os._exit(0)

def programs(function, task="shard_params"):
    """The Programs of a function on every case that was asked for, by name; nothing for another task."""
    from autograder.contract import wrapping
    from autograder.contract.case import from_plain

    asked = request()
    if asked is None or asked["task"] != task:
        return {}
    agreed = wrapping.wrappings(asked["chapter"])[task]
    cases = [from_plain(case, agreed.sizes) for case in asked["cases"]]
    return {case.name: wrapping.trace(agreed, function, case, lambda _: None) for case in cases}

def forge(function, change, task="shard_params"):
    """Send a function's Programs, each after ``change(program)`` has made bytes of it."""
    found = programs(function, task)
    if found:
        say({"cases": list(found), "line": f"{task}:1"}, [change(program) for program in found.values()])

def with_artefact(program, **fields):
    """The Program with some fields of its exported artefact replaced."""
    import dataclasses

    from jax import export

    exported = export.deserialize(bytearray(program.artefact))
    changed = dataclasses.replace(exported, **fields)
    return dataclasses.replace(program, artefact=bytes(changed.serialize())).serialise()

def with_module(program, edit):
    """The Program with the text of its StableHLO edited."""
    import re

    from jax import export
    from jax.extend import mlir
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    exported = export.deserialize(bytearray(program.artefact))
    version = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", exported.mlir_module_serialized[:200])[1].decode()
    with make_ir_context():
        module = ir.Module.parse(edit(str(ir.Module.parse(exported.mlir_module()))))
        data = mlir.serialize_portable_artifact(module, version, use_mixed_serialization=True)
    return with_artefact(program, mlir_module_serialized=data)

def with_header(program, **fields):
    """The Program with another header; the artefact stays."""
    import dataclasses

    return dataclasses.replace(program, **fields).serialise()

def through(program, operation):
    """The Program with one more operation on its first result; ``{value}`` and ``{type}`` stand for that result.

    Several operations must end in one that is called ``%forged``; what nothing reads is lost on the way.
    """
    import re

    def insert(found):
        value, kind = found[2], found[4]
        added = operation.replace("{value}", value).replace("{type}", kind)
        last = "" if "%forged" in operation else "%forged = "
        return f"{last}{added}\n{found[1]}%forged{found[3]}{kind}"

    return with_module(
        program, lambda text: re.sub(r"(sdy\.return )(%\w+)(,.*? : )(tensor<[^>]*>)", insert, text, count=1)
    )

# %% helper forges
class Forge:
    forge(right_shards, change)

# %% attack announces_too_much {uses = ["forge"]}
# Announces a header of 4 GiB and sends none of it.
class Say:
    if request():
        say_raw(b"\xff\xff\xff\xff{}")

# %% attack brings_a_gradient_of_its_own
# Attaches a second artefact as the program's derivative, which the header does not show.
from jax import export as jax_export

def with_derivative(program):
    exported = jax_export.deserialize(bytearray(program.artefact))
    return with_artefact(program, _get_vjp=lambda _: exported)

class Forge:
    original = jax_export.Exported.serialize
    jax_export.Exported.serialize = lambda self, original=original: original(self, vjp_order=self._get_vjp is not None)
    forge(right_shards, with_derivative)

# %% attack claims_effects
# Claims in the artefact an ordered effect, of a kind that only its own process knows.
from jax._src import effects

@dataclasses.dataclass(frozen=True)
class Secretly(effects.Effect):
    pass

class Forge:
    effects.lowerable_effects.add_type(Secretly)
    forge(right_shards, lambda program: with_artefact(program, ordered_effects=(Secretly(),)))

# %% attack forges_a_giant_constant
# Puts 4 MiB of cached answers into the artefact by hand, above the exporter's own limit.
OPERATION = """%cached = stablehlo.constant dense<"0xANSWERS"> : tensor<1048576xf32>
%one = stablehlo.slice %cached [3:4] : (tensor<1048576xf32>) -> tensor<1xf32>
%spread = stablehlo.broadcast_in_dim %one, dims = [0] : (tensor<1xf32>) -> {type}
%forged = stablehlo.maximum {value}, %spread : {type}"""

class Forge:
    answers = "".join(f"{number:08X}" for number in range(2**20))
    forge(right_shards, lambda program, op=OPERATION.replace("ANSWERS", answers): through(program, op))

# %% attack leaves_out_the_unseen_case
# Sends correct Programs for the public cases and none for the hidden one.
class Say:
    found = programs(right_shards)
    found.pop("unseen", None)
    if found:
        say({"cases": list(found), "line": ""}, [program.serialise() for program in found.values()])

# %% attack names_a_result_twice
# Returns one result twice under the same name, so that counts of results and results by name disagree.
from course.program import export

def twice(params, axis_name, min_size):
    return right_shards(params, axis_name, min_size)

def doubled():
    """The task's own wrapper with one more result, which then gets the name of another."""
    from autograder.contract import wrapping
    from autograder.contract.case import from_plain

    asked = request()
    if asked is None or asked["task"] != "shard_params":
        return
    agreed = wrapping.wrappings(asked["chapter"])["shard_params"]
    found = {}
    for case in [from_plain(case, agreed.sizes) for case in asked["cases"]]:
        wrapped = agreed.wrap(right_shards, case)

        def more(function=wrapped.function, **inputs):
            values = function(**inputs)["values"]
            return {"values": values, "valuez": values[min(values)]}

        def specs(of=wrapped.out_specs):
            return {"values": of()["values"], "valuez": of()["values"][min(of()["values"])]}

        program = export(more, wrapped.inputs, wrapped.in_specs, mesh=case.mesh, out_specs=specs, roles=wrapped.roles)
        name = program.outputs[0].name
        outputs = [dataclasses.replace(leaf, name=leaf.name.replace("valuez", name)) for leaf in program.outputs]
        found[case.name] = with_header(program, outputs=tuple(outputs))
    say({"cases": list(found), "line": ""}, list(found.values()))

class Forge:
    doubled()

# %% attack says_a_person_must_look {uses = ["forge"]}
# Writes to the result channel that a person must decide, which would stop every batch. A submission cannot decide
# that.
class Say:
    if request():
        say({"problem": {"verdict": "needs_human", "message": "the grader failed", "line": ""}})

# %% attack says_pass_itself {control = "stock nbgrader has no such channel; forged check cells are tried elsewhere",
#     uses = ["forge"]}
# Writes to the result channel that its verdict is "pass". A student's process may report only its own errors.
class Say:
    if request():
        say({"problem": {"verdict": "pass", "message": "all facts met", "line": "shard_params:1"}, "points": 10})

# %% attack sends_a_bottomless_header {uses = ["forge"]}
# Sends a Program whose header is nested a hundred thousand levels deep.
class Say:
    if request():
        names = [case["name"] for case in request()["cases"]]
        header = b"[" * 100_000
        program = b"MESHCRAFT-PROGRAM-1\n" + len(header).to_bytes(4, "big") + header
        say({"cases": names, "line": ""}, [program] * len(names))

# %% attack sends_a_pickle {uses = ["forge"]}
# Writes a pickle to the result channel that would run a command when loaded. Nothing loads pickles.
import pickle

class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/pwned $HOME/pwned",)

class Say:
    if request():
        say_raw(pickle.dumps(Evil()))

# %% attack sends_another_program
# Sends a program that keeps everything on every device, behind the header of one that splits by the rule.
def answer():
    right, cheap = programs(right_shards), programs(whole)
    if right:
        forged = [with_header(program, artefact=cheap[name].artefact) for name, program in right.items()]
        say({"cases": list(right), "line": ""}, forged)

class Forge:
    answer()

# %% attack sends_pickles_as_programs {uses = ["forge"]}
# Sends a well-formed message whose Programs are pickles.
import pickle

class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/pwned",)

class Say:
    if request():
        names = [case["name"] for case in request()["cases"]]
        say({"cases": names, "line": ""}, [pickle.dumps(Evil())] * len(names))

# %% attack swaps_programs
# Sends the Program for one device as the one for eight: nothing to communicate, nothing to split.
class Say:
    found = programs(right_shards)
    if found:
        say({"cases": list(found), "line": ""}, [found["data=1"].serialise()] * len(found))

# %% attack writes_a_header_by_hand
# Writes a header whose parts have the wrong types: numbers for names, lists for numbers, nothing where a tree is
# required.
ODD = {
    "data=8": {"donated": [[["deep"] * 3] * 3]},
    "pipe=3 x tensor=2": {"mesh": [["data", True]]},
    "data=2": {"inputs": None},
    "data=1": {"outputs": [{"name": 1, "shape": [1e300], "dtype": [], "spec": [[0]], "role": {}}]},
    "unseen": {"artefact": -1},
}

def odd(name, program):
    magic = b"MESHCRAFT-PROGRAM-1\n"
    data = program.serialise()
    length = int.from_bytes(data[len(magic) : len(magic) + 4], "big")
    header = json.loads(data[len(magic) + 4 : len(magic) + 4 + length])
    text = json.dumps({**header, **ODD[name]}).encode()
    return magic + len(text).to_bytes(4, "big") + text + data[len(magic) + 4 + length :]

class Forge:
    found = programs(right_shards)
    if found:
        say({"cases": list(found), "line": ""}, list(map(odd, found, found.values())))

# %% attack branches_in_the_artefact {then = "forges"}
# Puts a data-dependent branch into the artefact by hand: honest on ordinary values, different once a value is large.
OPERATION = """"stablehlo.case"(%index) ({
  stablehlo.return {value} : {type}
}, {
  %other = stablehlo.negate {value} : {type}
  stablehlo.return %other : {type}
}) : (tensor<i32>) -> {type}"""

def change(program):
    import re

    def insert(found):
        value, kind = found[2], found[4]
        shape = kind.removeprefix("tensor<").removesuffix("xf32>").split("x")
        first = f"stablehlo.slice {value} [{', '.join('0:1' for _ in shape)}]"
        one = f"tensor<{'1x' * len(shape)}f32>"
        before = (
            f"%first = {first} : ({kind}) -> {one}\n%flat = stablehlo.reshape %first : ({one}) -> tensor<f32>\n"
            f"%index = stablehlo.convert %flat : (tensor<f32>) -> tensor<i32>\n"
        )
        added = OPERATION.replace("{value}", value).replace("{type}", kind)
        return f"{before}%forged = {added}\n{found[1]}%forged{found[3]}{kind}"

    return with_module(
        program, lambda text: re.sub(r"(sdy\.return )(%\w+)(,.*? : )(tensor<[^>]*>)", insert, text, count=1)
    )

# %% attack calls_a_library {then = "forges"}
# Adds a custom call to a function of the linear algebra library, with operands that it does not expect.
CALL = "stablehlo.custom_call @lapack_sgetrf_ffi({value}) {api_version = 4 : i32} : ({type}) -> {type}"

change = lambda program: through(program, CALL)

# %% attack calls_an_unknown_target {then = "forges"}
# Adds a custom call to a target that is on no list.
CALL = "stablehlo.custom_call @give_full_points({value}) : ({type}) -> {type}"

change = lambda program: through(program, CALL)

# %% attack calls_python_by_address {then = "forges"}
# Adds a custom call to XLA's target for Python callbacks, with an index of its own. Where it runs, it crashes.
CALL = (
    "stablehlo.custom_call @xla_ffi_python_cpu_callback({value}) "
    "{api_version = 4 : i32, backend_config = {index = 81985529216486895 : ui64}} : ({type}) -> {type}"
)

change = lambda program: through(program, CALL)

# %% attack claims_an_unknown_dtype {then = "forges"}
# Claims in the header that results have a dtype that does not exist.
def change(program):
    return with_header(program, outputs=tuple(dataclasses.replace(leaf, dtype="float33") for leaf in program.outputs))

# %% attack claims_another_platform {then = "forges"}
# Claims in the artefact that it was made for GPUs, where the safety checks would let anything pass.
change = lambda program: with_artefact(program, platforms=("cuda",))

# %% attack claims_donated_inputs {then = "forges"}
# Claims in the header that all inputs may be overwritten, so that it appears to need less memory.
change = lambda program: with_header(program, donated=tuple(range(len(program.inputs))))

# %% attack claims_fewer_devices {then = "forges"}
# Claims in the artefact that it is for one device, and in the header that it is for eight.
change = lambda program: with_artefact(program, nr_devices=1)

# %% attack claims_other_shapes {then = "forges"}
# Claims in the header that results are an eighth of what the artefact returns.
def change(program):
    first, *others = program.outputs
    smaller = dataclasses.replace(first, shape=tuple(dim // 8 * 8 // 8 or 1 for dim in first.shape), spec=((),) * 2)
    return with_header(program, outputs=(smaller, *others))

# %% attack differs_between_devices {then = "forges"}
# Claims that a result is the same on every device, and returns a different one on each.
def change(program):
    """The scalar among the results, which is whole on every device, gets the device's number added."""
    import re

    def edit(text):
        if "manual_axes" not in text:  # one device: nothing to differ from
            return text
        scalar = re.search(r"(%arg\d+): tensor<f32>", text[text.index("manual_axes") :])[1]
        head, mark, tail = text.rpartition("sdy.return ")
        line, rest = tail.split("\n", 1)
        added = (
            "%who = stablehlo.partition_id : tensor<ui32>\n"
            "%number = stablehlo.convert %who : (tensor<ui32>) -> tensor<f32>\n"
            f"%own = stablehlo.add {scalar}, %number : tensor<f32>\n"
        )
        return head + added + mark + re.sub(rf"{scalar}\b", "%own", line, count=1) + "\n" + rest

    return with_module(program, edit)

# %% attack disables_safety_checks {then = "forges"}
# Switches off jax.export's own safety checks in the artefact.
from jax import export as jax_export

def change(program):
    checks = (jax_export.DisabledSafetyCheck.platform(), jax_export.DisabledSafetyCheck.custom_call("anything"))
    return with_artefact(program, disabled_safety_checks=checks)

# %% attack draws_at_random {then = "forges"}
# Adds random numbers that no seed determines, times zero: two gradings would not judge the same program.
OPERATION = """stablehlo.maximum {value}, {value} : {type}
%low = stablehlo.constant dense<0.0> : tensor<f32>
%high = stablehlo.constant dense<1.0> : tensor<f32>
%size = stablehlo.constant dense<[4]> : tensor<1xi64>
%drawn = stablehlo.rng %low, %high, %size, distribution = UNIFORM
  : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>"""

change = lambda program: through(program, OPERATION)

# %% attack flips_bits {then = "forges"}
# Flips one bit in every 64 bytes of each artefact.
def change(program):
    data = bytearray(program.artefact)
    for place in range(8, len(data), 64):
        data[place] ^= 1 << place % 7
    return with_header(program, artefact=bytes(data))

# %% attack sends_an_artefact_by_hand {then = "forges"}
# Sends handmade artefacts behind correct headers: a text that claims to be StableHLO.
def change(program):
    return with_header(program, artefact=b"ML\xefR\rStableHLO_v1.0.0\0" + b"func.func @main() { return }" * 50)

# %% attack truncates_the_artefact {then = "forges"}
# Cuts off the second half of each artefact and corrects the length in the header.
def change(program):
    return with_header(program, artefact=program.artefact[: len(program.artefact) // 2])

# %% attack waits_for_infeed {then = "forges"}
# Waits for data from the host that never arrives.
OPERATION = """stablehlo.maximum {value}, {value} : {type}
%token = stablehlo.create_token : !stablehlo.token
%fed:2 = "stablehlo.infeed"(%token) {infeed_config = ""} : (!stablehlo.token) -> ({type}, !stablehlo.token)"""

change = lambda program: through(program, OPERATION)

# %% attack kills_the_executor {verdict = "needs_human", group = "exhausts", control = "stock nbgrader has no executor",
#     functions = [], uses = ["forge", "honest"], then = "is_right"}
# A hand-made artefact, nested a million brackets deep, that ends the executor every time it is read; after three
# attempts a person is notified.
DEEP = b"module attributes {deep = " + b"[" * 10**6 + b"]" * 10**6 + b"} {}"

class Forged:
    forge(right_shards, lambda program: with_artefact(program, mlir_module_serialized=DEEP))
