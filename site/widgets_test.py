"""The pages' widgets: their numbers equal Python's on a grid, and they can be used by keyboard and from a link."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from browser_test import AXE, RUN_AXE, SHAPES, watched
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from playwright.sync_api import expect

from course.machines import machine


@pytest.fixture
def opened(browser, served):
    """Opens a page at a phone's width in the dark theme, and at the end checks what is common to all widgets."""
    pages = []

    def open_page(address, widget):
        page, noted = watched(browser, *SHAPES["phone"])
        page.goto(f"{served}/{address}")
        expect(page.locator(f"#{widget} [role=status]")).to_be_visible()
        pages.append((page, noted, widget))
        return page

    yield open_page
    for page, noted, widget in pages:
        assert page.evaluate("document.documentElement.scrollWidth") == SHAPES["phone"][0][0]
        page.evaluate(AXE)
        violations = page.evaluate(RUN_AXE.replace("{exclude: ['svg']}", f"'#{widget}'"))
        assert not violations, [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in violations]
        assert noted["failed"] == [] and noted["said"] == []
        page.context.close()


def replayed(kind, count, steps):
    """Yield the devices' chunks after each step if random numbers are sent, and the numbers; the last is the result."""
    data = np.random.default_rng(0).normal(size=(count, count))
    chunks = np.where(np.eye(count, dtype=bool), data, np.nan) if kind in ("all_gather", "all_to_all") else data.copy()
    outbox = data.copy()
    for messages in steps:
        assert sorted(m["source"] for m in messages) == sorted(m["target"] for m in messages) == list(range(count))
        values = [(outbox if kind == "all_to_all" else chunks)[m["source"], m["chunk"]] for m in messages]
        assert not np.isnan(values).any(), "a device sends only what it has"
        for value, m in zip(values, messages, strict=True):
            if kind == "all_to_all":
                assert m["chunk"] == m["target"]
                chunks[m["target"], m["source"]] = value
            else:
                chunks[m["target"], m["chunk"]] = value + (chunks[m["target"], m["chunk"]] if m.get("adds") else 0)
        yield chunks, data


@pytest.mark.long
def test_collectives_give_the_result_of_jax(opened):
    page = opened("collectives.html#steps?kind=reduce_scatter&n=6&step=2", "collectives-steps")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    outputs = page.evaluate(
        """(grid) => grid.map(([kind, n]) => {
          const { messages, holdings, numSteps } = window.meshcraftCollectives;
          const steps = Array.from({ length: numSteps(kind, n) }, (_, i) => messages(kind, n, i + 1));
          return { steps, holdings: steps.map((_, i) => holdings(kind, n, i + 1)) };
        })""",
        grid := list(product(kinds, (2, 3, 4, 8))),
    )
    for (kind, count), output in zip(grid, outputs, strict=True):
        assert len(output["steps"]) == (2 if kind == "all_reduce" else 1) * (count - 1)
        pairs = zip(replayed(kind, count, output["steps"]), output["holdings"], strict=True)
        for (chunks, data), holdings in pairs:
            for device, chunk in product(range(count), repeat=2):
                sources = holdings[device][chunk]
                if kind == "all_to_all":
                    assert np.isnan(chunks[device, chunk]) == (not sources)
                elif sources:
                    own = data[chunk, chunk] if kind == "all_gather" else data[sources, chunk].sum()
                    assert len(set(sources)) == len(sources) and chunks[device, chunk] == pytest.approx(own)
                else:
                    assert np.isnan(chunks[device, chunk])
        collective = {
            "all_gather": lambda x: jax.lax.all_gather(jnp.take(x, jax.lax.axis_index("i")), "i"),
            "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "i"),
            "all_reduce": lambda x: jax.lax.psum(x, "i"),
            "all_to_all": lambda x: jax.lax.all_to_all(x, "i", 0, 0),
        }[kind]
        result = np.diagonal(chunks) if kind == "reduce_scatter" else chunks
        np.testing.assert_allclose(result, jax.vmap(collective, axis_name="i")(jnp.asarray(data)), rtol=1e-5)

    status = page.locator("#collectives-steps [role=status]")
    expect(status).to_have_text("reduce-scatter on 6 devices, step 2 of 5: each device has sent 2/6 of the array.")
    assert page.locator("#collectives-steps td").filter(has_text="3 of 6").count() == 6
    next_step = page.get_by_role("button", name="next step")
    for _ in range(9):
        next_step.press("Enter")
    expect(status).to_contain_text("step 5 of 5")
    assert "step=5" in page.url and page.locator("#collectives-steps td").filter(has_text="sum").count() == 6
    page.locator("#steps-n").fill("0")
    expect(page.locator("#collectives-steps [role=alert]")).to_have_text("devices: give a whole number from 1 to 8")
    page.locator("#steps-n").fill("3")
    expect(status).to_contain_text("step 2 of 2")


SPECS = {
    'P("data", "tensor")': P("data", "tensor"),
    "P(None, 'data')": P(None, "data"),
    'P(("data", "tensor"),)': P(("data", "tensor")),
    'PartitionSpec(None, ("tensor", "data"))': P(None, ("tensor", "data")),
    'P("tensor", None, "data")': P("tensor", None, "data"),
    "P()": P(),
    'P("pipe")': P("pipe"),
    'P("data", ("tensor", "pipe"))': P("data", ("tensor", "pipe")),
}


def test_the_playground_places_blocks_as_jax_does(opened):
    page = opened("primer.html", "spec-playground")
    meshes = ({"data": 4, "tensor": 2}, {"data": 3, "tensor": 1}, {"tensor": 2, "data": 2, "pipe": 2}, {"data": 6})
    grid = list(product(meshes, ((16, 8), (12, 6, 6), (24,), (5, 4)), SPECS))
    placements = page.evaluate(
        """(grid) => grid.map(([mesh, shape, spec]) => {
          const { parseMesh, parseShape, parseSpec, shard } = window.meshcraftSpecs;
          try {
            return shard(parseMesh(mesh), parseShape(shape), parseSpec(spec));
          } catch (error) {
            return error.message;
          }
        })""",
        [[", ".join(f"{k}={v}" for k, v in mesh.items()), str(shape), spec] for mesh, shape, spec in grid],
    )
    placed = 0
    for (mesh, shape, spec), placement in zip(grid, placements, strict=True):
        count = int(np.prod(list(mesh.values())))
        devices = np.array(jax.devices()[:count]).reshape(tuple(mesh.values()))
        try:
            sharding = NamedSharding(Mesh(devices, tuple(mesh)), SPECS[spec])
            sharding.check_compatible_aval(shape)
            device_indices = sharding.devices_indices_map(shape)
            local = sharding.shard_shape(shape)
        except (ValueError, IndexError):
            assert isinstance(placement, str) and placement.startswith(("spec: ", "dim ")), (
                mesh,
                shape,
                spec,
                placement,
            )
            continue
        placed += 1
        assert isinstance(placement, dict), (mesh, shape, spec, placement)
        assert tuple(placement["local"]) == local
        for device, own in zip(devices.flat, placement["devices"], strict=True):
            expected = [index.indices(size)[:2] for index, size in zip(device_indices[device], shape, strict=True)]
            assert [tuple(interval) for interval in own["slices"]] == expected, (mesh, shape, spec)
    assert 35 < placed < len(grid) - 35

    status, alert = (page.locator(f"#spec-playground [role={role}]") for role in ("status", "alert"))
    expect(status).to_have_text(
        "Local shape (4, 4), 64 bytes on each of 8 devices. "
        "8 blocks, one device with each; 512 bytes on the whole mesh."
    )
    page.locator("#spec-spec").fill('P(("tensor", "data"))')
    expect(status).to_contain_text("Local shape (2, 8)")
    for text, wrong in {
        'P("data", "data")': 'spec: axis "data" occurs twice, and an axis can split one dim',
        'P("model")': 'spec: the mesh has no axis "model"',
        "P(data)": "spec: write it as in JAX",
        "P(None, None, None)": "spec: 3 entries for an array of 2 dims",
    }.items():
        page.locator("#spec-spec").fill(text)
        expect(alert).to_contain_text(wrong)
    page.locator("#spec-spec").fill('P(None, "data")')
    page.locator("#spec-mesh").fill("data=3")
    expect(alert).to_have_text("dim 1 has size 8, which is not divisible by 3")
    page.locator("#spec-mesh").fill("data=2, <b>=3")
    expect(alert).to_contain_text('not "<b>=3"')
    page.locator("#spec-mesh").fill("data=2, tensor=2")
    expect(status).to_contain_text("2 blocks, 2 devices with each")
    page.locator("#spec-playground summary").press("Enter")
    expect(page.locator("#spec-playground details td").last).to_have_text("[0:16, 4:8]")


def test_the_roofline_and_the_ring_take_the_machine_s_times(opened):
    page = opened("hardware.html#roofline?machine=8xB200&n=4", "roofline")
    names = page.evaluate("Object.keys(window.meshcraftMachines)")
    assert {"8xA5000", "8xH100", "8xMI300X", "64xTPUv5p"} < set(names)
    grid = [
        {"machine": name, "n": n, "tokens": tokens, "width": width, "features": features}
        for name, n, tokens, (width, features) in product(names, (2, 8), (1, 512), ((64, 4096), (8192, 1024)))
    ]
    results = page.evaluate("(grid) => grid.map(window.meshcraftRoofline.times)", grid)
    for state, result in zip(grid, results, strict=True):
        where, n, rows, width, features = machine(state["machine"]), *list(state.values())[1:]

        def matmul(rows, where=where, width=width, features=features):
            moved = 2 * (rows * width + width * features + rows * features)
            return where.matmul_seconds(2 * rows * width * features, moved, "bf16")

        def gather(whole, where=where, n=n):
            latency, rate = where.transfer("all_gather", tuple(range(n)), (n - 1) / n * whole, whole)
            return latency + (n - 1) / n * whole / rate

        latency, rate = where.transfer("collective_permute", tuple(range(n)), 2 * rows * width, 2 * rows * width)
        send = latency + 2 * rows * width / rate
        expected = {
            "seconds": matmul(rows),
            "weights": gather(2 * width * features),
            "whole": gather(2 * n * rows * width) + matmul(n * rows),
            "ring": matmul(rows) + (n - 1) * max(matmul(rows), send),
        }
        for key, value in expected.items():
            assert result[key] == pytest.approx(value, rel=1e-9), (state, key)
        assert (result["intensity"] < result["ridge"]) == (
            result["rate"] < where.efficiency.matmul * where.peak("bf16")
        )

    status = page.locator("#roofline [role=status]")
    expect(page.locator("#roofline-machine")).to_have_value("8xB200")
    expect(status).to_contain_text("bound by arithmetic")
    tokens = page.get_by_label("tokens on each device")
    tokens.focus()
    page.keyboard.press("Home")
    expect(status).to_contain_text("bound by memory")
    assert "tokens=1" in page.url and tokens.get_attribute("aria-valuetext") == "1"
    page.locator("#roofline-machine").select_option("64xTPUv5p")
    page.locator("#roofline-n").press("End")
    expect(page.locator("#roofline table")).to_contain_text("weights from 64 devices")
    page.locator("#roofline-machine").select_option("8xH100")
    expect(page.locator("#roofline table")).to_contain_text("weights from 8 devices")


def test_bars_of_a_timeline_are_read_and_zoomed_by_keyboard_and_touch(browser, served):
    page, noted = watched(browser, *SHAPES["phone"])
    page.goto(f"{served}/profiling/fsdp.html", wait_until="load")
    figures = page.locator("figure.drawn:has(.timeline-tools)").all()
    figure = next(figure for figure in figures if ".py:" in figure.inner_html())
    text, svg = figure.locator(".timeline-tools span"), figure.locator("svg")
    titles = figure.locator("svg :is(rect, path) > title").all_text_contents()
    for number in (1, 2):
        figure.get_by_role("button", name="next bar").press("Enter")
        expect(text).to_have_text(f"{number} of {len(titles)}: {titles[number - 1]}")
    figure.get_by_role("button", name="previous bar").press("Space")
    expect(text).to_contain_text(f"1 of {len(titles)}")
    before = svg.bounding_box()["width"]
    figure.get_by_role("button", name="zoom in").press("Enter")
    assert svg.bounding_box()["width"] == pytest.approx(2 * before, rel=0.02)
    figure.get_by_role("button", name="zoom out").press("Enter")
    assert svg.bounding_box()["width"] == pytest.approx(before, rel=0.02)
    assert any(".py:" in title for title in titles)
    widest = page.evaluate(
        """(figure) => {
          const bars = [...figure.querySelectorAll("svg :is(rect, path) > title")].map((title) => title.parentNode);
          const widths = bars.map((bar) => bar.getBoundingClientRect().width);
          const widest = widths.indexOf(Math.max(...widths));
          bars[widest].scrollIntoView({ block: "center", inline: "center" });
          const { left, top, width, height } = bars[widest].getBoundingClientRect();
          const at = { clientX: left + width / 2, clientY: top + height / 2, bubbles: true };
          document.elementFromPoint(at.clientX, at.clientY).dispatchEvent(new MouseEvent("click", at));
          return widest;
        }""",
        figure.element_handle(),
    )
    expect(text).to_have_text(f"{widest + 1} of {len(titles)}: {titles[widest]}")
    assert page.evaluate("document.documentElement.scrollWidth") == SHAPES["phone"][0][0]
    assert noted["failed"] == [] and noted["said"] == []
    page.context.close()
