"""The machines that programs are predicted for: ``machines.toml`` has their published figures, each with its source.

``scaled`` makes a machine of any size from one of them, and ``load`` reads one from a file in the same format.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from course.link import Link, Table, grid
from course.machine import Machine

# Fraction of the array that each of eight devices sends in a collective.
_SENT = {"all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_reduce": 14 / 8, "all_to_all": 7 / 8}
_FILE = Path(__file__).with_suffix(".toml")


class BadMachineFile(ValueError):
    """Raised when a machine file cannot be used; the message says where and why."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a file: machines by name, and notes that sources may refer to."""

    machines: dict[str, dict[str, Any]]
    notes: dict[str, str] = {}


_FIGURES = tuple(sorted({field.name for field in fields(Machine)} - {"name"} | {"link_rates"}))
_OPTIONAL = {"network", "efficiency", "launch", "matmul_rates", "sources", "compiler", "link_rates"}
_OF_LINKS = {"network", "rates", "latency"}
_LINK_FIGURES = tuple(sorted({field.name for field in fields(Link)} - {"rates"}))


def _machines(file: _File, known: dict[str, dict[str, Any]], notes: dict[str, str]) -> dict[str, Machine]:
    """The machines of a file.

    Args:
        file: The file.
        known: Tables that ``like`` may refer to; those of the file are added.
        notes: Added to those of the file.

    Raises:
        BadMachineFile: It does not contain valid machines.
    """
    machines = {}
    for name, own in file.machines.items():
        like = own.pop("like", None)
        if like is not None and (not isinstance(like, str) or like not in known):
            raise BadMachineFile(f"like is {like!r}, which is not a known machine; there are: {', '.join(known)}")
        base: dict[str, Any] = known[like] if like else {}
        if "links" in own:  # measurements over other links, and the network between nodes, do not apply to this machine
            base = {figure: value for figure, value in base.items() if figure not in ("network", "link_rates")}
            base["sources"] = {
                figure: text for figure, text in base.get("sources", {}).items() if figure not in _OF_LINKS
            }
        sources = _converted(own.pop("sources", {}), dict[str, str])
        known[name] = {**base, **own, "sources": base.get("sources", {}) | sources}
        machines[name] = _machine(name, known[name], notes | file.notes)
    return machines


def _machine(name: str, table: dict[str, Any], notes: dict[str, str]) -> Machine:
    """Build a machine from its table."""
    _require_known(table, _FIGURES, "a machine")
    if missing := [figure for figure in _FIGURES if figure not in {*table, *_OPTIONAL}]:
        raise BadMachineFile(f"{missing[0]} is missing")
    figures: dict[str, Any] = {"name": name} | {
        figure: value for figure, value in table.items() if figure != "link_rates"
    }
    if isinstance(figures.get("network"), dict):
        figures["network"] = {"group": 0, **figures["network"]}
    for link in [*(figures["links"] if isinstance(figures["links"], list) else []), figures.get("network")]:
        _require_known(link if isinstance(link, dict) else {}, _LINK_FIGURES, "a link")
    figures["sources"] = {figure: _filled(text, notes) for figure, text in figures["sources"].items()}
    machine: Machine = _converted(figures, Machine)
    measured: dict[str, Table] = _converted(table.get("link_rates", {}), dict[str, Table])
    rates = {
        kind: tuple((kib * 1024.0, _SENT.get(kind, 1) * gb * 1e9) for kib, gb in points)
        for kind, points in measured.items()
    }
    machine = replace(
        machine,
        links=tuple(replace(link, rates=rates) for link in machine.links),
        matmul_rates=tuple((2 * side**3, tera * 1e12) for side, tera in machine.matmul_rates),
    )
    _check(machine, rates)
    return machine


def _require_known(table: dict[str, Any], known: tuple[str, ...], subject: str) -> None:
    if unknown := [figure for figure in table if figure not in known]:
        raise BadMachineFile(f"{unknown[0]} is not a figure of {subject}; there are: {', '.join(known)}")


def _converted(data: Any, kind: Any) -> Any:
    """Convert plain data to a type."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$")
        place = where.strip(".`") + ": " if where else ""
        raise BadMachineFile(f"{place}{problem[0].lower()}{problem[1:]}") from None


def _filled(text: str, notes: dict[str, str]) -> str:
    """Replace the notes that a source refers to with their text; a note may refer to others."""
    for _ in range(3):
        text = re.sub(r"\{(\w+)\}", lambda match: notes.get(match[1], match[0]), text)
    return text


def _check(machine: Machine, rates: Mapping[str, Table]) -> None:
    """Raise ``BadMachineFile`` for impossible figures."""
    network = (machine.network,) if machine.network else ()
    positive = {name: getattr(machine, name) for name in ("num_devices", "vector_flops", "memory_bytes")}
    positive |= {"memory_bandwidth": machine.memory_bandwidth}
    positive |= {f"matmul_flops of {dtype}": peak for dtype, peak in machine.matmul_flops.items()}
    positive |= {f"bandwidth of {link.name}": link.bandwidth for link in (*machine.links, *network)}
    positive |= {f"group of {link.name}": link.group for link in machine.links}
    positive |= {f"efficiency of {name}": share for name, share in vars(machine.efficiency).items()}
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise BadMachineFile(f"{name} is {value:g}: it must be a positive, finite number")
    zero = {"launch": machine.launch} | {f"latency of {a.name}": a.latency for a in (*machine.links, *network)}
    for name, value in zero.items():
        if not 0 <= value < math.inf:
            raise BadMachineFile(f"{name} is {value:g}: it must be 0 or more, and finite")
    for name, table in {**rates, "matmuls": machine.matmul_rates}.items():
        ascending = all(a < b for (a, _), (b, _) in pairwise(table))
        if not ascending or (not table and name in rates) or not all(0 < x < math.inf for row in table for x in row):
            raise BadMachineFile(f"rates of {name} must be positive, by ascending size")
    if "bf16" not in machine.matmul_flops:
        raise BadMachineFile("matmul_flops has no bf16, the fallback for unlisted dtypes")
    groups = [link.group for link in machine.links]
    if not groups or groups[-1] != machine.num_devices:
        last = groups[-1] if groups else "no"
        raise BadMachineFile(f"the last link joins {last} devices, and num_devices is {machine.num_devices}")
    if wrong := [f"{a} and {b}" for a, b in pairwise(groups) if b % a or a == b]:
        raise BadMachineFile(f"links are innermost first, each group a multiple of the one before: {wrong[0]} are not")
    for index, link in enumerate(machine.links):
        if link.shared and not index:
            raise BadMachineFile(f"{link.name} is shared by the devices of an inner group, but is the first link")
        if link.torus and (index or math.prod(link.torus) != link.group):
            raise BadMachineFile(f"torus of {link.name} must multiply to its group, {link.group}, on the first link")


_TABLES: dict[str, dict[str, Any]] = {}
_DATA: _File = _converted(tomllib.loads(_FILE.read_text()), _File)
_BY_NAME = _machines(_DATA, _TABLES, {})


def load(path: Path) -> Machine:
    """Load a machine file: a table ``[machines.NAME]`` in the format of ``machines.toml``, which has every figure.

    ``like = "8xH100"`` takes every figure that the table does not give from a machine of the course.

    Raises:
        BadMachineFile: It cannot be read, or is not a machine; the message says what is wrong.
    """
    try:
        file: _File = _converted(tomllib.loads(path.read_text()), _File)
        if len(file.machines) != 1:
            raise BadMachineFile("it must have one table [machines.NAME], with a machine's figures")
        return next(iter(_machines(file, dict(_TABLES), _DATA.notes).values()))
    except OSError as error:
        raise BadMachineFile(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadMachineFile(f"{path} is not TOML: {error}") from None
    except BadMachineFile as error:
        raise BadMachineFile(f"{path}: {error}") from None


def scaled(machine: Machine, devices: int, nodes: int = 1) -> Machine:
    """Build a machine with this many devices and nodes from a machine with one node.

    Within a node it has the links of the machine, which may have more devices than requested; a torus is built to
    size, as close to a square or a cube as possible. Between nodes it has the machine's ``network``. A node is any
    unit without a network inside: eight GPUs, a rack of GB200, a slice of TPUs.

    >>> cluster = scaled(H100, 512, 64)
    >>> cluster.name, [(link.name, link.group) for link in cluster.links]
    ('64x8xH100', [('NVLink', 8), ('InfiniBand', 512)])

    Raises:
        ValueError: No such machine can be built; the message says why.
    """
    if devices < 1 or nodes < 1 or devices % nodes:
        raise ValueError(f"{devices} devices cannot be on {nodes} nodes, each with the same number")
    inside = _inside(machine)
    per_node, most = devices // nodes, max(inside[-1].group, inside[-1].largest)
    if per_node > most:
        raise ValueError(
            f"{devices} devices on {nodes} nodes are {per_node} on each, and one node of {machine.name} has at most "
            f"{most}: use at least {-(-devices // most)} nodes, or a machine file with the links that yours has"
        )
    links: list[Link] = []
    for link in inside:
        group = per_node if link is inside[-1] else min(link.group, per_node)
        if not links or group > links[-1].group:
            links.append(replace(link, group=group, torus=grid(group, len(link.torus)) if link.torus else ()))
    if any(b % a for a, b in pairwise(link.group for link in links)):
        raise ValueError(f"{per_node} devices are not a multiple of the group size {links[0].group} of {links[0].name}")
    if nodes > 1:
        if machine.network is None:
            raise ValueError(
                f"no network is given between nodes of {machine.name}: use one node, or a machine file with `network`"
            )
        links = [link for link in links if link.group > 1] + [replace(machine.network, group=devices)]
    size = f"{nodes}x{per_node}x" if nodes > 1 else f"{per_node}x"
    name = size + re.sub(r"^(\d+x)+", "", machine.name)
    return replace(machine, name=name, num_devices=devices, links=tuple(links))


def _inside(machine: Machine) -> tuple[Link, ...]:
    """The links within one node."""
    network = machine.network
    return machine.links[:-1] if network and machine.links[-1].name == network.name else machine.links


A5000, A100, H100, H100_CALIBRATED, TPU_V5E = (
    _BY_NAME[name] for name in ("8xA5000", "8xA100", "8xH100", "8xH100-calibrated", "8xTPUv5e")
)
TWO_A100 = scaled(A100, 16, 2)
MACHINES = tuple(m for entry in _BY_NAME.values() for m in ((entry, TWO_A100) if entry is A100 else (entry,)))

# Only compute takes time, so any idle time left comes from the schedule. No program runs on it, so no list of
# machines includes it.
FREE_NETWORK = Machine(
    name="free network",
    device="none: 1 TFLOP/s of matmuls, everything else at no cost",
    num_devices=64,
    matmul_flops={"bf16": 1e12, "f16": 1e12, "f32": 1e12},
    vector_flops=1e30,
    memory_bytes=1e12,
    memory_bandwidth=1e30,
    links=(Link("free", 64, 1e30, 0.0),),
)


def machine(name: str) -> Machine:
    """The machine with that name, ignoring case.

    Raises:
        LookupError: There is none; the message lists the existing ones.
    """
    for candidate in (*MACHINES, FREE_NETWORK):
        if candidate.name.lower() == name.lower():
            return candidate
    raise LookupError(f"no machine is called {name!r}; there are: {', '.join(m.name for m in MACHINES)}")


def chosen(name: str, devices: int | None = None, nodes: int | None = None) -> Machine:
    """The machine that a user asks for.

    Args:
        name: Name of a machine, or the path of a machine file, which ends in ``.toml``.
        devices: Total number of devices, if it differs from the machine's.
        nodes: Number of nodes; by default, as few as can hold the devices.

    Raises:
        LookupError: No machine has that name.
        ValueError: The file cannot be used, or there is no machine of that size.
    """
    base = load(Path(name)) if name.endswith(".toml") else machine(name)
    if devices is None and nodes is None:
        return base
    node = _inside(base)[-1]
    if devices is None:
        devices = node.group * (nodes or 1)
    return scaled(base, devices, nodes or -(-devices // max(node.group, node.largest)))
