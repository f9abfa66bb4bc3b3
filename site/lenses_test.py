"""The page on the lenses shows what the lenses give now; ``python site/lenses_test.py`` rewrites it and its picture."""

from __future__ import annotations

import re
import textwrap
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from autograder.cli import app
from course.machines import machine
from course.mesh import abstract_mesh
from course.program import Program, ProgramError, Timeline, costs, export, memory, parse, timeline
from course.program.compiled import AotMissing, GpuReport, compile_all
from course.render import side_by_side
from course.render.page_parts import generated, write_parts
from course.validation.gap import copying
from course.validation.report import recorded
from course.validation.rings import gather_matmul

SITE = Path(__file__).parent
PAGE = SITE / "pages" / "lenses.md"
PICTURE = SITE / "figures" / "ring_timeline.svg"
KEPT = SITE.parent / "autograder" / "proof" / "demo" / "submitted" / "kept" / "fsdp" / "fsdp.ipynb"
IDEAL, CALIBRATED = "8xH100", "8xH100-calibrated"
# Multiplications and additions of the whole product.
MODEL_FLOPS = 2 * 4096 * 4096 * 16384
AGAIN = "run: python site/lenses_test.py"


def _table(columns: tuple[str, ...], rows: list[list[str]], left: int = 1) -> str:
    rule = "|" + "---|" * left + "---:|" * (len(columns) - left)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


@cache
def _gathered(ring: bool) -> Program:
    return gather_matmul(ring)


@cache
def _timed(ring: bool, on: str) -> Timeline:
    return timeline(parse(_gathered(ring)), machine(on))


def _command(*arguments: str) -> str:
    """What the command prints, as a text block."""
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return "```text\n" + "\n".join(line.rstrip() for line in done.output.strip().splitlines()) + "\n```"


def predicted(folder: Path) -> str:
    """``meshcraft predict`` on the ring's Program."""
    file = folder / "ring.program"
    file.write_bytes(_gathered(True).serialise())
    return _command("predict", str(file), "--machine", IDEAL, "--model-flops", f"{MODEL_FLOPS}")


def profiled(folder: Path) -> str:
    """The first table of ``meshcraft profile`` on a submission that keeps the gathered weights."""
    said = _command("profile", "fsdp", "fsdp_loss", "--notebook", str(KEPT))
    return said.split("\n\n")[0] + "\n```"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def loses(folder: Path) -> str:
    """The ring and the plain gather on both H100 machines, in microseconds."""
    rows = []
    for on in (IDEAL, CALIBRATED):
        plain, ring = _timed(False, on), _timed(True, on)
        bars = {(timed is ring, bar.kind): bar.end - bar.start for timed in (plain, ring) for bar in timed.bars}
        products = [_micro(bars[which, "dot_general"]) for which in (False, True)]
        moved = [_micro(bars[False, "all_gather"]), _micro(bars[True, "collective_permute"])]
        steps = [_micro(plain.seconds), _micro(ring.seconds), f"{ring.seconds / plain.seconds:.2f}"]
        rows.append([f"`{on}`", *moved, *products, *steps])
    columns = ("µs", "the all-gather", "one permute", "the product", "a chunk's", "plain", "ring", "ring / plain")
    return _table(columns, rows)


def lensed(folder: Path) -> str:
    """Both programs by every lens that counts or predicts; needs the GPU compiler."""
    reports = compile_all([gather_matmul(ring, platform="cuda") for ring in (False, True)], machine(IDEAL))
    both = [_lensed(ring, report) for ring, report in zip((False, True), reports, strict=True)]
    return _table(("", "plain", "ring"), [[name, *(found[name] for found in both)] for name in both[0]])


def _lensed(ring: bool, report: GpuReport) -> dict[str, str]:
    program, timed = _gathered(ring), _timed(ring, IDEAL)
    module = parse(program)
    found = costs(module)
    assert report.schedule is not None
    return {
        "costs: FLOPs of a device": f"{found.flops / 1e9:.1f} GFLOP",
        "costs: sent by a device": f"{sum(c.total_bytes for c in found.collectives) / 2**20:g} MiB",
        "memory: temporaries": f"{memory(module, program).temporaries / 2**20:.0f} MiB",
        "compiled: temporaries": f"{report.memory.temporaries / 2**20:.0f} MiB",
        "timeline: a step": f"{_micro(timed.seconds)} µs",
        "timeline: exposed": f"{_micro(timed.exposed_seconds)} µs",
        "compiled: the schedule, replayed": f"{_micro(report.replay.seconds)} µs",
        "compiled: exposed": f"{_micro(sum(report.replay.exposed.values()))} µs",
        "compiled: copying": f"{_micro(copying(report.schedule, machine(IDEAL)))} µs",
        "compiled: collectives": f"{sum(c.count for c in report.collectives)}",
        "compiled: coverage": f"{report.coverage:.0%}",
    }


def disagree(folder: Path) -> str:
    """Timeline and replay of the six recorded runs, split."""
    rows = []
    for gap in recorded().gaps:
        assert gap.compiled is not None
        line, real = gap.timeline, gap.compiled
        cells = [f"{line.products:.2f}", f"{line.others:.2f}", f"{real.products:.2f}", f"{real.others:.2f}",
                 f"{real.copies:.2f}", f"{line.moved / 1e9:.0f}", f"{real.moved / 1e9:.0f}"]  # fmt: skip
        rows.append([gap.name, f"{gap.measured:g}", *cells])
    columns = ("seconds, and GB", "measured", "timeline: products", "others", "replay: products", "others",
               "of these, copies", "timeline: GB moved", "replay")  # fmt: skip
    return _table(columns, rows)


X = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
TABLE = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)


def _exported(local, outside=lambda y: y) -> Program:
    mesh, spec = {"data": 4}, P("data")
    run = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=spec, out_specs=spec)
    return export(lambda x: {"y": outside(run(x))}, X, {"x": spec}, mesh=mesh, out_specs={"y": spec},
                  locate=lambda file: "step" if file == __file__ else None)  # fmt: skip


def _reached_by_one(x):
    first = lax.axis_index("data") == 0
    return lax.cond(first, lambda x: lax.pcast(lax.psum(x, "data"), "data", to="varying"), lambda x: x, x)


REFUSED = {
    "a branch on data": lambda: _exported(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x.T @ x, lambda x: x, x)),
    "a loop until data says so": lambda: _exported(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: 2 * x, x)),
    "a callback": lambda: _exported(
        lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((16, 64), x.dtype), x)
    ),
    "a table computed beforehand": lambda: _exported(lambda x: x + jnp.asarray(TABLE)[:16, :64]),
    "work outside of `shard_map`": lambda: _exported(lambda x: 2 * x, outside=lambda y: y @ y.T @ y),
    "a collective that not everyone reaches": lambda: _exported(_reached_by_one),
}


def _message(make) -> str:
    try:
        module = parse(make())
        costs(module)
        timeline(module, machine(IDEAL))
    except ProgramError as error:
        return str(error)
    raise AssertionError("this was to be refused")


def refused(folder: Path) -> str:
    """What the lenses say to programs that they refuse, with ``cell:line`` where the line stands."""
    found = []
    for name, make in REFUSED.items():
        said = textwrap.fill(re.sub(r"step:\d+", "cell:line", _message(make)), 96)
        found.append(f"# {name}\n{said}")
    return "```text\n" + "\n\n".join(found) + "\n```"


BLOCKS = {
    "predicted": predicted, "profiled": profiled, "loses": loses, "lensed": lensed, "disagree": disagree,
    "refused": refused,
}  # fmt: skip


def picture() -> str:
    """Plain and ring on one time scale."""
    return side_by_side({"plain all-gather": _timed(False, IDEAL), "ring": _timed(True, IDEAL)})


def write(folder: Path) -> None:
    """Put what the lenses give into the page."""
    write_parts(PAGE, {name: make(folder) for name, make in BLOCKS.items()})
    PICTURE.write_text(picture() + "\n")


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_part_is_what_the_lenses_give(name, tmp_path):
    try:
        made = BLOCKS[name](tmp_path)
    except AotMissing:
        pytest.skip("the GPU compiler (extra aot) is not installed")
    assert generated(PAGE, name) == made, AGAIN


def test_picture_is_what_the_timeline_gives():
    drawn = picture()
    assert PICTURE.read_text() == drawn + "\n", AGAIN
    ElementTree.fromstring(drawn)


def test_numbers_in_the_text_are_those_of_the_lenses():
    text = " ".join(PAGE.read_text().split())
    gaps = recorded().gaps
    first, inner, block = gaps[0], gaps[3].timeline.flops, gaps[4].timeline.flops
    assert first.compiled is not None
    again, once = first.compiled.flops / 1e12, first.timeline.flops / 1e12
    replayed = [float(us) for us in re.findall(r"replayed \| ([\d.]+) µs \| ([\d.]+) µs", text)[0]]
    ideal = [_timed(which, IDEAL).seconds for which in (False, True)]
    assert [gap.compiled.again > 0 for gap in gaps if gap.compiled] == [True] + [False] * (len(gaps) - 1)
    ring, plain = _timed(True, CALIBRATED), _timed(False, CALIBRATED)
    lasts = {
        bar.kind: bar.end - bar.start for timed in (ring, plain) for bar in timed.bars if bar.kind != "dot_general"
    }
    sent = {bar.kind: bar.bytes for timed in (ring, plain) for bar in timed.bars}
    wire = {kind: sent[kind] / lasts[kind] / 450e9 for kind in ("collective_permute", "all_gather")}
    assert wire == pytest.approx({"collective_permute": 1 / 8, "all_gather": 1 / 2}, rel=0.03)
    products = [next(b.end - b.start for b in t.bars if b.kind == "dot_general") for t in (ring, plain)]
    assert products[0] / products[1] == pytest.approx(1 / 5, rel=0.02)
    for said in (
        f"--model-flops {MODEL_FLOPS}",
        f"takes {1e6 * lasts['collective_permute']:.0f} µs and not",
        f"products of {1e6 * products[0]:.0f} µs",
        f"it is {7 / 23:.4f}",
        f"has {again:.1f} TFLOP of products where the program has {once:.1f}",
        f"sees {ideal[1] / ideal[0]:.2f} of the plain step and the replay {replayed[1] / replayed[0]:.2f}",
        f"from {inner / 1e12:.1f} to {block / 1e12:.1f} TFLOP, and the measured step from {gaps[3].measured} to",
        f"to {gaps[4].measured} s",
        f"risen by {100 * (block / inner * gaps[3].measured / gaps[4].measured - 1):.0f} %",
        f"MFU falls by {100 * (1 - gaps[3].measured / gaps[4].measured):.0f} %",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    ("sizes", "said"), [((65_536, 8192, 32_768), "takes {:.2f} of the plain"), ((4096, 4096, 131_072), "takes {:.2f}.")]
)
def test_sizes_at_which_the_ring_wins_or_not_are_those_in_the_answer(sizes, said):
    found = [timeline(parse(gather_matmul(ring, *sizes)), machine(CALIBRATED)).seconds for ring in (False, True)]
    assert said.format(found[1] / found[0]) in " ".join(PAGE.read_text().split())


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
