"""The page on machines has the tables that ``course.machines`` gives; ``python site/machines_test.py`` rewrites it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from course.machine import Machine
from course.machines import A5000, H100, H100_CALIBRATED, MACHINES, TPU_V5E, TWO_A100
from course.render.page_parts import generated, write_parts

PAGE = Path(__file__).parent / "pages" / "machines.md"
MIB = 2**20


def _table(head: str, rows: list[list[str]], left: int = 1) -> str:
    rule = "|" + "---|" * left + "---:|" * (head.count("|") - 1 - left)
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def figures() -> str:
    """Every machine, a row each."""
    rows = []
    for m in MACHINES:
        peaks = [m.matmul_flops.get(dtype) for dtype in ("bf16", "f32", "f8")]
        shown = [f"{peak / 1e12:g}" if peak else "" for peak in (*peaks, m.vector_flops)]
        memory = [f"{m.memory_bytes / 1e9:g}", f"{m.memory_bandwidth / 1e9:,.0f}"]
        rows.append([f"`{m.name}`", m.device, str(m.num_devices), *shown, *memory])
    return _table("| machine | device | devices | bf16 | f32 | f8 | vector | GB | GB/s |", rows, left=2)


def links() -> str:
    """Every link of every machine."""
    rows = [
        [f"`{m.name}`", link.name, str(link.group), f"{link.bandwidth / 1e9:g}", f"{link.latency * 1e6:g}"]
        for m in MACHINES
        for link in m.links
        if not m.calibrated
    ]
    return _table("| machine | link | joins | GB/s, one way | latency, µs |", rows, left=2)


def axes() -> str:
    """What ``Machine.axis_links`` says for some meshes."""
    meshes = [
        (A5000, {"data": 4, "tensor": 2}),
        (A5000, {"tensor": 2, "data": 4}),
        (A5000, {"data": 8}),
        (H100, {"data": 4, "tensor": 2}),
        (TWO_A100, {"data": 2, "tensor": 8}),
        (TWO_A100, {"data": 4, "tensor": 4}),
        (TWO_A100, {"data": 16}),
    ]
    rows = []
    for m, mesh in meshes:
        written = ", ".join(f"`{axis}` = {size}" for axis, size in mesh.items())
        over = ", ".join(f"`{axis}`: {link}" for axis, link in m.axis_links(mesh).items())
        rows.append([f"`{m.name}`", written, over])
    return _table("| machine | mesh | runs over |", rows, left=3)


def _microseconds(m: Machine, kind: str, size: float, share: float) -> str:
    latency, rate = m.transfer(kind, tuple(range(8)), share * size, size)
    return f"{1e6 * (latency + share * size / rate):,.0f}"


def compared() -> str:
    """The idealised and the calibrated H100 side by side, in microseconds."""
    rows = []
    for kind, share, name in (
        ("all_gather", 7 / 8, "all-gather"),
        ("all_reduce", 14 / 8, "all-reduce"),
        ("collective_permute", 1, "permute"),
    ):
        for mib in (1, 4, 32, 128):
            both = [_microseconds(m, kind, mib * MIB, share) for m in (H100, H100_CALIBRATED)]
            rows.append([f"{name}, {mib} MiB", *both])
    for side in (1024, 4096):
        both = [f"{1e6 * m.matmul_seconds(2 * side**3, 0, 'bf16'):,.0f}" for m in (H100, H100_CALIBRATED)]
        rows.append([f"bfloat16 product, {side:,} cubed", *both])
    return _table("| | `8xH100`, µs | `8xH100-calibrated`, µs |", rows)


def sources() -> str:
    """Where each figure is from."""
    said = []
    for m in MACHINES:
        said.append(f'??? note "{m.name}"\n')
        said += [f"    - **{figure.replace('_', ' ')}**: {source}" for figure, source in m.sources.items()]
        said.append("")
    return "\n".join(said).rstrip()


BLOCKS = {"machines": figures, "links": links, "axes": axes, "compared": compared, "sources": sources}


def write() -> None:
    """Put what the code says into the page."""
    write_parts(PAGE, {name: make() for name, make in BLOCKS.items()})


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_part_is_what_the_code_says(name):
    assert generated(PAGE, name) == BLOCKS[name](), "run: python site/machines_test.py"


def test_numbers_in_the_text_are_the_machines():
    text = PAGE.read_text()
    pairs, wide = A5000.bandwidth_of((0, 1)), A5000.bandwidth_of(tuple(range(8)))
    strided = A5000.bandwidth_of((0, 2, 4, 6))
    nodes = TWO_A100.bandwidth_of(tuple(range(16)))
    for said in (
        f"{strided / 1e9:g} GB/s",
        f"{wide / 1e9:g} GB/s",
        f"eight adapters, {nodes / 1e9:g} GB/s",
        f"{TPU_V5E.links[0].bandwidth / 1e9:g} GB/s one way, {TPU_V5E.transfer('all_gather', (0, 1), 1, 1)[1] / 1e9:g}",
        f"{A5000.efficiency.matmul:g} of the matrix peak and {A5000.efficiency.memory:g} of the memory bandwidth",
    ):
        assert said in text, said
    assert pairs == wide


if __name__ == "__main__":
    sys.exit(write())
