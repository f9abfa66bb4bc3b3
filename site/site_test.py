"""The site: it builds strictly, has every chapter, and makes no requests to other hosts."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import origins
import pytest
from origins import Origin

from course.curriculum import CHAPTERS, NOTEBOOKS

SITE = Path(__file__).parent

# Addresses in Material's own scripts. Those in the first script are requested only by features our pages do not use: a
# browser without ResizeObserver, a Mermaid diagram, a repository's star count; the pages' policy refuses them all the
# same. The others are in messages.
UNREACHED = {"bundle": {"unpkg.com", "api.github.com", "${e}"}, "search": {"bit.ly"}, "wordcut": {"github.com"}}
# Sentences that state a lower bound on the bytes sent: a switch that adds sends less, as in a node the course models.
BOUND = re.compile(
    r"[^.:]*(?:no algorithm|whatever the algorithm|any algorithm)[^.:]*|[^.]*\bcan\s+send\s+less[^.]*", re.I
)
NAMESPACES = ("http://www.w3.org/", "https://www.w3.org/")


class _Resources(HTMLParser):
    """Resources that a browser loads automatically: everything with an address, except links to follow."""

    LINKS = ("a", "area")

    def __init__(self, page: str):
        super().__init__()
        self.addresses: list[str] = []
        self.policy = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        if values.get("http-equiv", "").lower() == "content-security-policy":
            self.policy = values["content"]
        if tag in self.LINKS or (tag == "link" and values.get("rel") in ("canonical", "next", "prev")):
            return
        names = ("src", "srcset", "href", "xlink:href", "data", "poster", "action", "style")
        self.addresses += [values[name] for name in names if name in values]


class _Prose(HTMLParser):
    """The text of a page's article that a reader sees, without code, formulas and pictures."""

    LITERAL = ("code", "pre", "script", "style", "math", "svg")

    def __init__(self, page: str):
        super().__init__()
        self.text, self.within = "", 0
        self.feed(re.findall(r"<article.*?</article>", page, re.DOTALL)[0])

    def handle_starttag(self, tag, attrs):
        self.within += tag in self.LITERAL

    def handle_endtag(self, tag):
        self.within -= tag in self.LITERAL

    def handle_data(self, data):
        self.text += "" if self.within else data


def _hosts(code: str) -> set[str]:
    code = re.sub(r"/\*.*?\*/|(?<!\S)//.*?$", "", code, flags=re.DOTALL | re.MULTILINE)
    addresses = re.findall(r"https?://[^\s\"'`)<]+", code)
    return {urlsplit(address).netloc for address in addresses if not address.startswith(NAMESPACES)}


def test_every_page_is_built_and_so_is_the_404_page(built):
    pages = SITE / "pages"
    expected = {"404.html", *(str(page.relative_to(pages).with_suffix(".html")) for page in pages.rglob("*.md"))}
    expected |= {f"{folder}{entry.name}.html" for entry in CHAPTERS for folder in ("", "profiling/")}
    assert {str(page.relative_to(built)) for page in built.rglob("*.html")} == expected


def test_no_page_loads_anything_from_another_host(built):
    for page in built.rglob("*.html"):
        text = page.read_text()
        resources = _Resources(text)
        outside = [r for r in resources.addresses if re.search(r"(https?:)?//", r) and not r.startswith("data:")]
        assert not outside, f"{page.name} loads {outside}"
        inline = "\n".join(re.findall(r"<style.*?</style>|<script.*?</script>", text, re.DOTALL))
        assert not _hosts(inline), f"{page.name} names another host in a script or style"


def test_every_page_forbids_requests_to_other_hosts(built):
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


def test_nothing_is_left_to_include_or_to_fill_in(built):
    for page in built.rglob("*.html"):
        if page.name != "contributing.html":  # which says how it is written
            left = re.search(r"--?8\s*(?:<|&lt;)|\{\{", page.read_text())
            assert not left, f"{page.name}: {left}"


def test_no_formula_is_left_as_latex(built):
    for page in built.rglob("*.html"):
        assert "arithmatex" not in page.read_text(), page.name
    assert (built / "fsdp.html").read_text().count("<math") > 20


def test_no_markdown_is_left_on_a_page(built):
    raw = re.compile(r"`|\*\*|\]\(|\]\[|^(?:!!!|\?\?\?|#+ |\s*\|.*\|)|^:   \w|\$\$|\$\w|\{[.:#]", re.MULTILINE)
    for page in built.rglob("*.html"):
        if page.name != "404.html":
            text = _Prose(page.read_text()).text
            left = raw.search(text)
            assert not left, f"{page.name}: {text[max(0, left.start() - 60) : left.end() + 60]!r}"


@pytest.mark.parametrize("page", ["index.html", "trust.html"])
def test_navigation_follows_the_curriculum(built, page):
    text = (built / page).read_text()
    for folder, entries in (("", NOTEBOOKS), ("profiling/", CHAPTERS)):
        places = [text.index(f'href="{folder}{entry.name}.html" class="md-nav__link"') for entry in entries]
        assert places == sorted(places)


def test_home_page_lists_every_chapter_and_its_functions(built):
    table = (built / "index.html").read_text().split('id="chapters"')[1]
    for entry in CHAPTERS:
        assert f'<a href="{entry.name}.html">{entry.title}</a>' in table
    assert "<code>shard_params</code>, <code>gather_params</code>" in table


def test_every_picture_and_everything_that_an_example_shows_has_a_badge(built):
    badges = Counter()
    for source in (SITE / "pages").rglob("*.md"):
        page = (built / source.relative_to(SITE / "pages")).with_suffix(".html").read_text()
        figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
        assert all('<figcaption><span class="badge">' in figure for figure in figures), source.name
        text = re.sub(r"^``` ?(?!text\n)\S.*?^```$", "", source.read_text(), flags=re.DOTALL | re.MULTILINE)  # commands
        included = re.findall(r'^--8<-- "(?:\w+)/(?:\w+)\.txt"$', text, re.MULTILINE)
        written = re.findall(r"^<!-- origin: ", text, re.MULTILINE)
        assert page.count('<p class="origin"><span class="badge">') == len(included) + len(written), source.name
        badges.update(re.findall(r'class="badge">(.*?)</span>', page))
    assert set(badges) == set(get_args(Origin)) and badges["predicted, idealised"] > 60


ORIGIN = r'(<p class="origin">(?:(?!</p>).)*</p>)?\s*(?:<!--[^>]*-->\s*)*<table>(.*?)</table>'


def without_badge(page: str) -> list[str]:
    """Tables in which a third of the cells are figures, but which no badge precedes."""
    tables = []
    for badge, table in re.findall(ORIGIN, page, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", table, re.DOTALL)
        figures = [
            cell for cell in cells if re.fullmatch(r"[-+<]?\s*\d[\d,.]*\s*(?:%|[kKMGTµmn]?i?[Bs])?", cell.strip())
        ]
        if 3 * len(figures) >= len(cells) > 0 and not badge:
            tables.append(table[:300])
    return tables


def test_every_table_of_figures_has_a_badge(built):
    for page in built.rglob("*.html"):
        assert without_badge(page.read_text()) == [], page.name
    table = "<table><td>reference</td><td>1.25</td><td>12%</td></table>"
    assert without_badge(f"<h2>No origin</h2>{table}")
    assert not without_badge(f'<p class="origin">…</p>\n{table}')


def test_an_example_that_does_not_say_where_its_table_is_from_fails(monkeypatch):
    for state in ("EXAMPLES", "ORIGINS"):
        monkeypatch.setattr(origins, state, {})
    with pytest.raises(ValueError, match="an origin is one of"):
        origins.example("guessed")
    origins.example("sourced", drawn="diagram")(lambda: None)
    assert [origins.origins_of("<lambda>", name) for name in ("table", "drawn")] == [("sourced",), ("diagram",)]
    origins.example()(lambda: None)
    with pytest.raises(ValueError, match="shows table, which needs a badge"):
        origins.origins_of("<lambda>", "table")
    assert origins.predicted_on("8xH100") == "predicted, idealised"
    assert origins.predicted_on("8xH100-calibrated") == origins.predicted_on("8xA5000") == "predicted, calibrated"


def test_every_claimed_lower_bound_says_that_only_the_devices_add(built):
    texts = {page.name: _Prose(page.read_text()).text for page in built.rglob("*.html") if page.name != "404.html"}
    texts |= {book.name: book.read_text() for book in (SITE.parent / "exercises").rglob("*.ipynb")}
    claims = [(name, match[0]) for name, text in texts.items() for match in re.finditer(BOUND, text)]
    assert claims and all("only the devices add" in " ".join(claim.split()) for _, claim in claims), claims


def test_captions_are_written_in_html(built):
    for page in built.rglob("*.html"):
        for caption in re.findall(r"<figcaption>(.*?)</figcaption>", page.read_text(), re.DOTALL):
            assert not re.search(r"`|\*\*|\]\(|\$", caption), f"{page.name}: {caption}"


def test_home_starts_with_the_first_chapter(built):
    text = (built / "index.html").read_text()
    commands = re.sub(r"<[^>]+>", "", text)
    assert f"meshcraft start {CHAPTERS[0].name}" in commands and "meshcraft start fsdp" not in commands
    heads = re.findall(r"<th[^>]*>(.*?)</th>", text.split('id="chapters"')[1])
    assert heads[:4] == ["chapter", "in a few words", "you write", "time (estimate)"]
    assert 'href="https://example.org/meshcraft"' in text


def test_every_command_is_in_the_reference(built):
    from autograder.cli import app

    text = (built / "commands.html").read_text()
    names = [command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands]
    assert len(names) > 15 and [name for name in names if f"meshcraft {name}" not in text] == []
