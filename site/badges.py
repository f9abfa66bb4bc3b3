"""MkDocs hook: label each example's table and picture with its origin, and offer a timeline's trace for download."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.structure.files import File

OUT = Path(__file__).parent.parent / "build" / "examples"
WRITTEN = re.compile(r"^<!-- origin: (.*) -->$", re.MULTILINE)  # above a table that no example computes
INCLUDED = r'--8<-- "([\w/]+\.(?:txt|svg))"'
BLOCK = re.compile(rf"^<figure[^>]*>.*?</figure>|^```text\n.*?^```$|^{INCLUDED}$", re.DOTALL | re.MULTILINE)
# Origins of pictures in ``site/figures``: screenshots, and what ``course.validation`` draws; others are hand-made.
FIGURES = {"xprof": ["measured"], "validation": ["measured", "predicted"]}

ORIGINS: dict[str, list[str]] = {}
TRACES: dict[str, str] = {}


def on_files(files, config, **_):
    """Read the origins that the examples declare, and add their traces to the site."""
    for path in sorted(OUT.glob("*.json")):
        results = json.loads(path.read_text())
        ORIGINS.update({f"{path.stem}/{name}": origins for name, origins in results["origins"].items()})
        TRACES.update({f"{path.stem}/{name}.svg": f"{path.stem}_{name}.json" for name in results["traces"]})
        for name, recording in results["recordings"].items():
            TRACES[f"{path.stem}/{name}.svg"] = f"{path.stem}_{name}.json.gz"
            target = f"assets/traces/{path.stem}_{name}.json.gz"
            files.append(File.generated(config, target, abs_src_path=str(OUT.parents[1] / recording)))
        for name, trace in results["traces"].items():
            files.append(File.generated(config, f"assets/traces/{path.stem}_{name}.json", content=trace))
    return files


def badges(included: list[str]) -> str:
    """The badges for the texts and pictures that a block includes.

    Raises:
        KeyError: An example does not declare the origin of a text or picture.
    """
    origins: dict[str, None] = {}
    for name in included:
        hand = FIGURES.get(Path(name).stem.partition("_")[0], ["diagram"])
        origins |= dict.fromkeys(hand if name.startswith("site/figures/") else ORIGINS[name])
    return shown(origins)


def shown(origins: Iterable[str]) -> str:
    """Format origins as badges."""
    return " ".join(f'<span class="badge">{origin}</span>' for origin in origins)


def on_page_markdown(markdown, page, **_):
    """Put badges in front of captions, texts and tables, and a link to the trace behind a timeline's caption."""
    top = "../" * page.url.count("/")

    def marked(match: re.Match[str]) -> str:
        block, included = match[0], re.findall(INCLUDED, match[0])
        if not included:
            return block
        text = badges(included)
        if not block.startswith("<figure"):
            return f'<p class="origin">{text}</p>\n\n{block}'
        links = [
            f' <a class="trace" href="{top}assets/traces/{TRACES[name]}" download>Download its trace</a>'
            for name in included
            if name in TRACES
        ]
        if "<figcaption>" not in block:
            block = block.replace("</figure>", "<figcaption></figcaption></figure>")
        block = block.replace("<figcaption>", f"<figcaption>{text} ", 1)
        return block.replace("</figcaption>", f"{''.join(links)}</figcaption>", 1)

    written = WRITTEN.sub(lambda match: f'<p class="origin">{shown(match[1].split("; "))}</p>', markdown)
    return BLOCK.sub(marked, written)


def on_page_content(content, page, **_):
    """Turn the empty corner of a table from a heading into a plain cell."""
    return re.sub(r"<th( [^>]*)?></th>", r"<td\1></td>", content)
