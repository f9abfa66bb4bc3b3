"""Every page in a real browser: it asks nothing of another host, fits a phone, and is accessible; the search finds."""

from __future__ import annotations

import os
import re
from importlib.resources import files

import pytest
from playwright.sync_api import expect

FULL = bool(os.environ.get("MESHCRAFT_FULL"))
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
# Pictures are described by their title and not read letter by letter.
RUN_AXE = "axe.run({exclude: ['svg']}, {resultTypes: ['violations']}).then((found) => found.violations)"
SHAPES = {"desktop": ((1280, 900), "light"), "phone": ((390, 800), "dark")}


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


@pytest.mark.parametrize("shape", SHAPES)
def test_every_page_is_quiet_fits_and_is_accessible(browser, built, served, shape):
    size, scheme = SHAPES[shape]
    page, noted = watched(browser, size, scheme)
    pages = sorted(str(found.relative_to(built)) for found in built.rglob("*.html"))
    for number, name in enumerate(pages):
        page.goto(f"{served}/{name}", wait_until="load")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0], f"{name} is wider than the window"
        assert not page.evaluate("document.documentElement.classList.contains('no-js')"), f"{name}: no script ran"
        if FULL or number % 2 == (shape == "phone"):
            page.evaluate(AXE)
            found = [v for v in page.evaluate(RUN_AXE) if v["impact"] in ("serious", "critical")]
            assert not found, (name, [(v["id"], [node["html"][:200] for node in v["nodes"][:3]]) for v in found])
    home = served.rpartition("/")[0]
    assert not [url for url in noted["asked"] if not url.startswith((home, "data:", "blob:"))]
    assert not [url for url in noted["asked"] if "/search/" in url], "the index is for those who search"
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
