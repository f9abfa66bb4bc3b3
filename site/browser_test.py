"""Every page in a real browser: it asks nothing of another host, fits a phone, and is accessible; the search finds."""

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

# All tests of the site are in one worker, which must not begin when the others end.
pytestmark = pytest.mark.long


def watched(browser, size, scheme):
    """A page, and what it asked for in vain, of whom, and what it complained about."""
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


@pytest.mark.parametrize(("size", "scheme"), [*SHAPES.values(), *OTHERS.values()], ids=[*SHAPES, *OTHERS])
def test_every_page_is_quiet_fits_and_is_accessible(browser, built, served, size, scheme):
    page, noted = watched(browser, size, scheme)
    pages = sorted(str(found.relative_to(built)) for found in built.rglob("*.html"))
    for number, name in enumerate(pages):
        page.goto(f"{served}/{name}", wait_until="load")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0], f"{name} is wider than the window"
        assert not page.evaluate("document.documentElement.classList.contains('no-js')"), f"{name}: no script ran"
        if FULL or number % 8 == 4 * (scheme == "dark"):
            page.evaluate(AXE)
            found = [v for v in page.evaluate(RUN_AXE) if v["impact"] in ("serious", "critical")]
            assert not found, (name, [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in found])
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
    found = page.evaluate(
        "(grid) => grid.map((s) => window.meshcraftMemory.problem(s) || window.meshcraftMemory.budget(s))", grid
    )
    counted = 0
    for state, mine in zip(grid, found, strict=True):
        sizes = Sizes(*(state[key] for key in ("layers", "width", "heads", "vocab", "seq")))
        mesh = {axis: state[axis] for axis in ("data", "tensor", "pipe")}
        step = {key: state[key] for key in ("batch", "microbatches", "precision", "remat", "fsdp")}
        try:
            theirs = budget(sizes, mesh=mesh, dropout=False, **step)
        except ValueError:
            assert isinstance(mine, str), state
            continue
        counted += 1
        names = {"optimizer": "optimizer (Adam)", "recomputed": "recomputed, one layer"}
        for row in theirs.rows:
            assert mine["rows"][names.get(row.name, row.name)] == pytest.approx(row.bytes, rel=1e-9, abs=1), (
                state,
                row,
            )
        assert mine["total"] == pytest.approx(theirs.total, rel=1e-9, abs=8)
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


def test_a_page_that_is_not_there_leads_home_wherever_it_is_asked_for(browser, served):
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
