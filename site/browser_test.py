"""Every page in a real browser: it requests nothing from other hosts, fits a phone and is accessible; search works."""

from __future__ import annotations

import os
import re
from importlib.resources import files

import pytest
from playwright.sync_api import expect

from course.budget import PRECISIONS, Sizes, budget

FULL = bool(os.environ.get("MESHCRAFT_FULL"))
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
# Pictures are described by their title and not read letter by letter.
RUN_AXE = "axe.run({exclude: ['svg']}, {resultTypes: ['violations']}).then((found) => found.violations)"
SHAPES = {"desktop": ((1280, 900), "light"), "phone": ((390, 800), "dark")}
OTHERS = {"dark desktop": ((1280, 900), "dark"), "light phone": ((390, 800), "light")} if FULL else {}

# All tests of the site run in one worker, which must not start only when the others finish.
pytestmark = pytest.mark.long


def watched(browser, size, scheme):
    """Open a page; return it with its requests, those that failed, and its errors and warnings."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, bypass_csp=False, reduced_motion="reduce"
    )
    page, noted = context.new_page(), {"asked": [], "failed": [], "said": []}
    page.on("request", lambda request: noted["asked"].append(request.url))
    page.on("requestfailed", lambda r: r.failure != "net::ERR_ABORTED" and noted["failed"].append(r.url))
    page.on("response", lambda response: response.status >= 400 and noted["failed"].append(response.url))
    page.on("console", lambda message: message.type in ("error", "warning") and noted["said"].append(message.text))
    page.on("pageerror", lambda error: noted["said"].append(str(error)))
    return page, noted


def test_every_page_logs_no_errors_fits_the_window_and_is_accessible(browser, built, served):
    shapes = [*SHAPES.values(), *OTHERS.values()]
    page, noted = watched(browser, *shapes[0])
    pages = sorted(str(path.relative_to(built)) for path in built.rglob("*.html"))
    for number, name in enumerate(pages):
        # Each page is loaded in one shape and resized to the others; every second page is loaded on the phone.
        for size, scheme in shapes[:: 1 - 2 * (number % 2)]:
            page.set_viewport_size({"width": size[0], "height": size[1]})
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            if page.url != f"{served}/{name}":
                page.goto(f"{served}/{name}", wait_until="load")
            page.evaluate("new Promise(requestAnimationFrame)")
            assert page.evaluate("document.documentElement.scrollWidth") == size[0], f"{name} is wider than the window"
            if FULL or number % 8 == 3 * (scheme == "dark"):
                page.evaluate(AXE)
                violations = [v for v in page.evaluate(RUN_AXE) if v["impact"] in ("serious", "critical")]
                assert not violations, (
                    name,
                    [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in violations],
                )
        assert not page.evaluate("document.documentElement.classList.contains('no-js')"), f"{name}: no script ran"
    home = served.rpartition("/")[0]
    assert not [url for url in noted["asked"] if not url.startswith((home, "data:", "blob:"))]
    assert not [url for url in noted["asked"] if "/search/" in url], "the index is for those who search"
    assert noted["failed"] == [] and noted["said"] == []
    page.context.close()


def test_the_memory_calculator_counts_as_the_command_and_is_used_by_keyboard(browser, served):
    page, noted = watched(browser, *SHAPES["phone"])
    page.goto(f"{served}/memory.html#memory?layers=16&width=2048&heads=16&remat=none")
    grid = [
        {
            "layers": 8,
            "width": 256,
            "heads": 8,
            "vocab": 1000,
            "seq": 96,
            "batch": 24,
            "precision": precision,
            "remat": remat,
        }
        | {"data": data, "tensor": tensor, "pipe": pipe, "microbatches": count, "fsdp": fsdp}
        for precision in PRECISIONS
        for remat in ("none", "attention", "block")
        for data, tensor, pipe, count in (
            (1, 1, 1, 1),
            (3, 1, 1, 2),
            (2, 4, 1, 1),
            (1, 2, 4, 6),
            (6, 2, 2, 2),
            (1, 3, 1, 1),
        )
        for fsdp in (False, True)
    ]
    results = page.evaluate(
        "(grid) => grid.map((s) => window.meshcraftMemory.problem(s) || window.meshcraftMemory.budget(s))", grid
    )
    counted = 0
    for state, result in zip(grid, results, strict=True):
        sizes = Sizes(*(state[key] for key in ("layers", "width", "heads", "vocab", "seq")))
        mesh = {axis: state[axis] for axis in ("data", "tensor", "pipe")}
        step = {key: state[key] for key in ("batch", "microbatches", "precision", "remat", "fsdp")}
        try:
            expected = budget(sizes, mesh=mesh, dropout=False, **step)
        except ValueError:
            assert isinstance(result, str), state
            continue
        counted += 1
        names = {"optimizer": "optimizer (Adam)", "recomputed": "recomputed, one layer"}
        for row in expected.rows:
            assert result["rows"][names.get(row.name, row.name)] == pytest.approx(row.bytes, rel=1e-9, abs=1), (
                state,
                row,
            )
        assert result["total"] == pytest.approx(expected.total, rel=1e-9, abs=8)
    assert len(grid) * 0.8 < counted < len(grid)
    status = page.get_by_role("status").filter(has_text="devices")
    expect(page.get_by_label("layers")).to_have_value("16")
    before = status.text_content()
    page.get_by_label("data", exact=True).focus()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("alert")).to_contain_text("sequences 64 is not divisible by data x microbatches = 9")
    page.get_by_label("sequences in a step").fill("72")
    expect(status).to_contain_text("on each of 9 devices")
    assert status.text_content() != before and "data=9" in page.url and "batch=72" in page.url
    assert page.evaluate("document.documentElement.scrollWidth") == SHAPES["phone"][0][0]
    assert noted["failed"] == [] and noted["said"] == []
    page.context.close()


def test_a_missing_page_links_to_the_home_page_at_any_depth(browser, served):
    page, noted = watched(browser, *SHAPES["desktop"])
    page.goto(f"{served}/no/such/page.html")
    failed = [url for url in noted["failed"] if not url.endswith("/no/such/page.html")]
    assert failed == [] and page.locator("h1").text_content() == "There is no page here"
    page.get_by_role("link", name="home page").click()
    expect(page.locator("h1")).to_contain_text("Train neural networks")
    page.context.close()


@pytest.mark.parametrize("where", ["disk", "host"])
def test_the_search_finds_every_term_of_the_glossary_and_is_used_by_keyboard(browser, built, served, where):
    page, noted = watched(browser, *SHAPES["desktop"])
    base = f"file://{built}" if where == "disk" else served
    page.goto(f"{base}/profiling/fsdp.html")
    page.keyboard.press("/")
    page.keyboard.type("wrong bubble")
    expect(page.locator("#search-status")).to_contain_text(re.compile("section|Nothing"))
    page.locator("#search input").fill("hybrid sharding")
    expect(page.locator("#search-results a").first).to_contain_text("Hybrid sharding")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_be_visible()
    assert re.search(r"(fsdp|glossary).html", page.url)
    page.goto(f"{base}/glossary.html")
    terms = page.locator("dt").all_text_contents()
    page.locator("#search input").focus()
    lost = page.evaluate(
        """async (terms) => {
          const { load, search } = window.meshcraftSearch;
          const entries = await load(document.getElementById("search").dataset.base);
          return terms.filter((term) => !search(entries, term).some(({ location }) => location.startsWith("glossary")));
        }""",
        terms,
    )
    assert len(terms) > 30 and lost == []
    assert noted["failed"] == [] and noted["said"] == []
    page.context.close()
