"""The site: it builds strictly, asks no other host for anything, and its numbers are those of the formulas."""

from __future__ import annotations

import functools
import http.server
import json
import math
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import jax
import pytest
import yaml

from course.curriculum import CHAPTERS, NOTEBOOKS, PRIMER
from course.model import transformer

SITE = Path(__file__).parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Addresses in Material's own scripts. The first script's are asked only by something that our pages do not have: a
# browser without ResizeObserver, a Mermaid diagram, a repository's star count; the pages' policy refuses them all the
# same. The others stand in messages.
UNREACHED = {
    "bundle": {"unpkg.com", "api.github.com", "${e}"},
    "search": {"bit.ly"},
    "wordcut": {"github.com"},
}
NAMESPACES = ("http://www.w3.org/", "https://www.w3.org/")


class _Resources(HTMLParser):
    """What a browser loads for a page by itself: everything with an address, except links for a reader to follow."""

    LINKS = ("a", "area")

    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.policy = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        if values.get("http-equiv", "").lower() == "content-security-policy":
            self.policy = values["content"]
        if tag in self.LINKS or (tag == "link" and values.get("rel") in ("canonical", "next", "prev")):
            return
        names = ("src", "srcset", "href", "xlink:href", "data", "poster", "action", "style")
        self.found += [values[name] for name in names if name in values]


def _hosts(code: str) -> set[str]:
    code = re.sub(r"/\*.*?\*/|(?<!\S)//.*?$", "", code, flags=re.DOTALL | re.MULTILINE)
    addresses = re.findall(r"https?://[^\s\"'`)<]+", code)
    return {urlsplit(address).netloc for address in addresses if not address.startswith(NAMESPACES)}


def test_every_page_is_built_and_so_is_the_404_page(built):
    wanted = {"index.html", "grading.html", "404.html", *(f"{entry.name}.html" for entry in CHAPTERS)}
    wanted |= {f"profiling/{entry.name}.html" for entry in CHAPTERS} | {"primer.html", "contributing.html"}
    wanted |= {
        "lenses.html",
        "memory.html",
        "planning.html",
        "schedules.html",
        "machines.html",
        "training.html",
        "validation.html",
        "trust.html",
        "teaching.html",
    }
    assert {str(page.relative_to(built)) for page in built.rglob("*.html")} == wanted


def test_no_page_loads_anything_from_another_host(built):
    for page in built.rglob("*.html"):
        text = page.read_text()
        resources = _Resources(text)
        outside = [r for r in resources.found if re.search(r"(https?:)?//", r) and not r.startswith("data:")]
        assert not outside, f"{page.name} loads {outside}"
        inline = "\n".join(re.findall(r"<style.*?</style>|<script.*?</script>", text, re.DOTALL))
        assert not _hosts(inline), f"{page.name} names another host in a script or style"


def test_every_page_forbids_the_browser_to_ask_another_host(built):
    for page in built.rglob("*.html"):
        policy = _Resources(page.read_text()).policy
        assert policy.startswith("default-src 'self'"), f"{page.name} has no policy"
        assert not re.search(r"https?:|\*", policy), f"{page.name} allows other hosts: {policy}"


def test_no_stylesheet_loads_anything_from_another_host(built):
    for sheet in built.rglob("*.css"):
        loaded = re.findall(r"url\(([^)]*)\)|@import\s+([^;]+)", sheet.read_text())
        outside = [a or b for a, b in loaded if re.match(r"[\"']?(https?:)?//", a or b)]
        assert not outside, f"{sheet.name} loads {outside}"


def test_scripts_name_no_host_but_those_known_to_be_unreached(built):
    for script in built.rglob("*.js"):
        unknown = _hosts(script.read_text()) - UNREACHED.get(script.name.split(".")[0], set())
        assert not unknown, f"{script.name} names {unknown}"


def test_no_formula_is_left_as_latex(built):
    for page in built.rglob("*.html"):
        assert "arithmatex" not in page.read_text(), page.name
    assert (built / "fsdp.html").read_text().count("<math") > 20


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_asks_nothing_of_another_host(built, tmp_path):
    handler = functools.partial(_Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        for page in sorted(str(p.relative_to(built)) for p in built.rglob("*.html")):
            requests, console = _visit(
                f"{home}/{page}", tmp_path / f"{page.replace(chr(47), chr(45))}.json", tmp_path / "profile"
            )
            assert any(r.endswith("/search/search_index.json") for r in requests), f"{page}: its script did not run"
            assert not [r for r in requests if not r.startswith((home, "data:", "blob:"))], page
            assert "Content Security Policy" not in console, console
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def _visit(address: str, log: Path, profile: Path) -> tuple[set[str], str]:
    """What a page, opened in a browser that can reach only this machine, asked for; and the browser's console."""
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
            *("--disable-component-update", "--disable-sync", "--disable-extensions", "--enable-logging=stderr"),
            *("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--virtual-time-budget=3000"),
            *(f"--user-data-dir={profile}", f"--log-net-log={log}", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    origin = "{0.scheme}://{0.netloc}".format(urlsplit(address))
    events = json.loads(log.read_text())["events"]
    parameters = [event.get("params", {}) for event in events]
    asked = {p["url"] for p in parameters if str(p.get("initiator", "")).startswith(origin) and "url" in p}
    return asked, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without resolving MkDocs' own tags."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: f"{suffix} {node.value}")


def test_navigation_follows_the_curriculum():
    config = yaml.load((SITE / "mkdocs.yml").read_text(), _Loader)
    chapters = next(entry["Chapters"] for entry in config["nav"] if "Chapters" in entry)
    assert chapters == [{entry.title: f"{entry.name}.md"} for entry in NOTEBOOKS]


def test_home_page_lists_every_chapter_and_the_primer():
    home = (SITE / "pages" / "index.md").read_text()
    assert f"[{PRIMER.title}]({PRIMER.name}.md)" in home
    for entry in CHAPTERS:
        assert f"| [{entry.title}]({entry.name}.md) | {entry.summary} |" in home


def _section(name: str) -> str:
    text = (SITE / "pages" / "fsdp.md").read_text()
    return re.search(rf"<!-- {name}: .*?-->(.*?)<!-- end of (?:the )?{name} -->", text, re.DOTALL)[1]


def _rows(section: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {row[0]: row[1:] for row in cells}


def _assert_no_other_numbers(section: str, known: set[str]) -> None:
    found = set(re.findall(r"\d[\d,]*(?:\.\d+)?", section.replace(", ", " ")))
    assert found <= known, f"the page has numbers that nothing computes: {sorted(found - known)}"


def test_worked_example_is_what_the_formulas_give():
    devices, min_size, gb = 8, 1_048_576, 1e9
    sizes = dict(num_layers=32, width=4096, hidden=16384, vocab=32768, max_seq=2048)
    params = jax.eval_shape(transformer(num_heads=32, **sizes).init, jax.random.key(0))
    count = {path: math.prod(leaf.shape) for path, leaf in jax.tree.leaves_with_path(params)}

    def total(keep):
        return sum(size for path, size in count.items() if keep(path, size))

    whole = total(lambda path, size: size < min_size)
    split = total(lambda path, size: size >= min_size)
    tables = total(lambda path, size: path[0].key == "embed")
    layers = total(lambda path, size: path[0].key == "layers")
    layer_split = total(lambda path, size: path[0].key == "layers" and size >= min_size) // sizes["num_layers"]
    everything, held = whole + split, whole + split // devices
    share = (devices - 1) / devices
    plain = 2 * share * 4 * everything
    sharded = [share * 4 * x for x in (split, split - tables, split, 2 * whole)]

    expected = {
        "in the whole model": [f"{everything:,}"],
        "in one layer": [f"{layers // sizes['num_layers']:,}"],
        "in leaves that stay whole (norms, biases)": [f"{whole:,}"],
        "held by each device": [f"{held:,}"],
        "parameters": [f"{4 * x / gb:.2f}" for x in (everything, held)],
        "gradients": [f"{4 * x / gb:.2f}" for x in (everything, held)],
        "Adam's $m$ and $v$": [f"{8 * x / gb:.2f}" for x in (everything, held)],
        "all of these": [f"{16 * x / gb:.2f}" for x in (everything, held)],
        "the layer in use, whole": ["0.00", f"{4 * layer_split / gb:.2f}"],
        "all-gather, forward": ["0.00", f"{sharded[0] / gb:.2f}"],
        "all-gather, backward": ["0.00", f"{sharded[1] / gb:.2f}"],
        "reduce-scatter": ["0.00", f"{sharded[2] / gb:.2f}"],
        "all-reduce": [f"{plain / gb:.2f}", f"{sharded[3] / gb:.2f}"],
        "together": [f"{plain / gb:.2f}", f"{sum(sharded) / gb:.2f}"],
    }
    section = _section("worked example")
    rows = _rows(section)
    assert {label: rows.get(label) for label in expected} == expected
    prose = {f"{size:,}" for size in (*sizes.values(), devices, min_size)}
    prose |= {"80", "1", "10", "9", "1.5", f"{sum(sharded) / plain:.2f}", f"{4 * everything / gb:.2f}"}
    _assert_no_other_numbers(section, prose | {value for row in expected.values() for value in row})


def test_tokens_that_hide_a_gather_are_what_the_formula_gives():
    devices, weight_bytes, flops = 8, 2, 989e12
    section = _section("machine")
    rows = _rows(section)
    known = {"989", "100", "400", "900", "450", "50", "1,979", "16", "2", "8", f"{flops / 450e9:,.0f}"}
    for network, bandwidth in (("NVLink", 450e9), ("400 Gbit/s Ethernet or InfiniBand", 50e9)):
        tokens = f"{weight_bytes / 2 * flops / bandwidth * (devices - 1) / devices:,.0f}"
        assert rows[network] == [f"{bandwidth / 1e9:.0f}", tokens]
        known.add(tokens)
    _assert_no_other_numbers(section, known)
