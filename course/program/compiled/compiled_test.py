"""The compiled analysis: its refusals, its messages if it cannot run, and, if the extra is installed, its results."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxlib
import msgspec
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.program import ProgramError
from course.program.compiled import DEFAULT_FLAGS, GpuReport, compile_all, compile_for, plugin
from course.program.compiled.plugin import PACKAGES, AotMissing, find_plugin, install_command
from course.program.compiled.target import target_config
from course.program.program_test import program_of, struct

JAXLIB = jaxlib.__version__
H100 = machine("8xH100")
MIB = 2**20


def missing():
    """The reason why the compiler cannot run here, empty if it can."""
    try:
        find_plugin()
    except AotMissing as error:
        return str(error)
    return ""


needs_aot = pytest.mark.skipif(bool(missing()), reason=missing())


def cuda_program(local, inputs, specs, out, **options):
    return program_of(local, inputs, specs, out, platform="cuda", locate={__file__: "here"}.get, **options)


def gathered(x, w):
    return lax.all_gather(x, "data", tiled=True) @ w


def ring(x, w):
    n, rows, place = 8, x.shape[0], lax.axis_index("data")
    out = lax.pcast(jnp.zeros((rows * n, w.shape[1]), x.dtype), "data", to="varying")
    for step in range(n):
        out = lax.dynamic_update_slice(out, x @ w, ((place - step) % n * rows, 0))
        if step < n - 1:
            x = lax.ppermute(x, "data", [(i, (i + 1) % n) for i in range(n)])
    return out


def layers(x, ws):
    return lax.scan(lambda x, w: (jax.nn.relu(x @ lax.all_gather(w, "data", tiled=True)), None), x, ws)[0]


def sharded_matmul(local):
    inputs = {"x": struct(4096, 4096, dtype=jnp.bfloat16), "w": struct(4096, 16384, dtype=jnp.bfloat16)}
    return cuda_program(local, inputs, {"x": P("data"), "w": P(None, "data")}, P(None, "data"))


def small(local=gathered, **options):
    inputs = {"x": struct(64, 64), "w": struct(64, 64)}
    return cuda_program(local, inputs, {"x": P("data"), "w": P(None, "data")}, P(None, "data"), **options)


# Results


@pytest.fixture(scope="module")
def reports():
    scanned = cuda_program(
        layers, {"x": struct(64, 64), "ws": struct(6, 64, 64)}, {"x": P("data"), "ws": P(None, "data")}, P("data")
    )
    inputs, rows = {"x": struct(64, 64), "w": struct(64, 64)}, {"x": P("data"), "w": P("data")}
    donated = cuda_program(lambda x, w: x + w, inputs, rows, P("data"), donate=("x",))
    return compile_all([sharded_matmul(ring), sharded_matmul(gathered), scanned, donated], H100)


@pytest.mark.long
@needs_aot
def test_ring_overlaps_every_permute_and_needs_half_the_temporaries(reports):
    report = reports[0]
    (permute,) = report.collectives
    assert (permute.kind, permute.axes, permute.count) == ("collective_permute", ("data",), 7)
    assert permute.asynchronous and permute.spans_matmul and permute.operand_bytes == 4 * MIB
    assert permute.line == f"here:{ring.__code__.co_firstlineno + 6}"
    assert report.coverage == 1.0
    assert report.memory.temporaries == pytest.approx(16 * MIB, rel=0.001)


@needs_aot
def test_plain_gather_is_one_synchronous_collective(reports):
    report = reports[1]
    (gather,) = report.collectives
    assert (gather.kind, gather.count, gather.asynchronous, gather.spans_matmul) == ("all_gather", 1, False, False)
    assert report.coverage == 0.0 and report.coverage_in_loops is None
    assert report.memory.temporaries == pytest.approx(32 * MIB, rel=0.001)
    assert report.memory.peak == report.memory.temporaries + (4 + 16 + 16) * MIB


@needs_aot
def test_replay_exposes_the_plain_gather_and_not_the_ring(reports):
    overlapped, plain = (report.replay for report in reports[:2])
    assert sum(overlapped.exposed.values()) < 0.1 * sum(plain.exposed.values())
    assert overlapped.matmul == pytest.approx(plain.matmul, rel=0.1)
    assert overlapped.seconds < 0.75 * plain.seconds


@needs_aot
def test_collective_in_a_loop_is_counted_once_a_trip(reports):
    assert [(c.kind, c.count, c.in_loop) for c in reports[2].collectives] == [("all_gather", 6, True)]
    assert reports[2].coverage_in_loops == 0.0


@needs_aot
def test_report_survives_json_and_records_what_it_was_compiled_with(reports):
    for report in reports:
        loaded = json.loads(json.dumps(report.to_json()))
        loaded = msgspec.convert({**loaded, "mesh": dict(loaded["mesh"])}, GpuReport)
        assert loaded == replace(report, schedule=None)
    assert reports[0].flags == {"xla_gpu_dot_merger_threshold_mb": 0}
    assert reports[0].versions == {"jax": jax.__version__, "plugin": JAXLIB}
    assert reports[0].machine == "8xH100"


@needs_aot
def test_donated_input_is_aliased_and_counted_once(reports):
    memory = reports[3].memory
    assert memory.aliased == memory.outputs == 64 * 64 * 4 / 8
    assert memory.peak == memory.temporaries + memory.arguments


@needs_aot
@pytest.mark.parametrize(
    ("flags", "cut", "options", "message"),
    [
        ({"xla_gpu_nonsense": 1}, None, {}, r"xla_gpu_nonsense.*take out the one"),
        (DEFAULT_FLAGS, None, {"time_limit": 0.1}, r"stopped after 0\.1 seconds"),
        (DEFAULT_FLAGS, 200, {}, "cannot be read"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_nothing_is_written_to_stderr(flags, cut, options, message, capfd):
    program = small()
    with pytest.raises(ProgramError, match=message):
        compile_for(replace(program, artefact=program.artefact[:cut]), H100, flags, **options)
    assert capfd.readouterr() == ("", "")


# Refusals


def test_program_for_cpus_is_refused_with_the_remedy():
    with pytest.raises(ProgramError, match=r'this one is for cpu: export it with platform="cuda"'):
        compile_for(replace(small(), platform="cpu"), H100)


def test_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ProgramError, match="needs 8 devices and 8xH100 has 4"):
        compile_for(small(), replace(H100, num_devices=4))


def test_machine_without_figures_for_the_compiler_is_refused():
    with pytest.raises(ProgramError, match=r"8xH100 cannot be compiled for: its `compiler` lacks core_count"):
        target_config(replace(H100, compiler={}))
    with pytest.raises(ProgramError, match=r"compute capability 7\.0"):
        target_config(replace(H100, compiler={**H100.compiler, "major": 7}))


def test_target_is_written_from_the_machine():
    text = target_config(machine("8xA5000"))
    for part in ("core_count: 64 ", "major: 8 minor: 6", "threads_per_core_limit: 1536", "memory_bandwidth: 768000"):
        assert part in text


# Without the compiler


def installed(folder, **versions):
    for name, number in versions.items():
        info = folder / f"{name}-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {number}\n")


def everything(number):
    return {"jax_cuda12_plugin": number, "jax_cuda12_pjrt": number, "nvidia_cuda_nvcc_cu12": "12.9.86"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHCRAFT_AOT", str(tmp_path))
    monkeypatch.setattr(plugin.sys, "path", [])
    monkeypatch.setattr(plugin.sys, "platform", "linux")
    monkeypatch.setattr(plugin.platform, "machine", lambda: "x86_64")
    return tmp_path


def test_missing_extra_says_how_to_install_it(folder):
    installed(folder, **{"jax_cuda12_plugin": JAXLIB})
    with pytest.raises(AotMissing, match=r"not installed \(220 MB\)") as error:
        compile_for(small(), H100)
    assert install_command() in str(error.value) and f"--target {folder}" in install_command()


def test_plugin_for_another_jax_says_so(folder):
    installed(folder, **everything("0.9.9"))
    with pytest.raises(AotMissing, match=rf"jax-cuda12-plugin 0\.9\.9 .* jaxlib is {JAXLIB}"):
        find_plugin()


def test_platform_without_wheels_says_so(folder, monkeypatch):
    installed(folder, **everything(JAXLIB))
    monkeypatch.setattr(plugin.sys, "platform", "darwin")
    with pytest.raises(AotMissing, match="this is darwin on x86_64; the other analyses do not need it"):
        find_plugin()


def test_folder_of_its_own_goes_before_this_environment(folder, monkeypatch):
    installed(folder / "venv", **everything("0.9.9"))
    monkeypatch.setattr(plugin.sys, "path", [str(folder / "venv")])
    with pytest.raises(AotMissing, match="must be the same"):
        find_plugin()
    installed(folder, **everything(JAXLIB))
    assert find_plugin().folder == folder and set(find_plugin().versions) == set(PACKAGES)
