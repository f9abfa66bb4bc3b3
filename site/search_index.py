"""MkDocs hook: the search index as a script of plain text, loaded when somebody searches (widgets/search.js)."""

import html
import json
import re
from pathlib import Path


def _plain(text: str) -> str:
    text = re.sub(r"<(svg|math|style|script)\b.*?</\1>", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text))).strip()


def on_post_build(config):
    """Replace the theme's index by a list of location, page, section and text."""
    folder = Path(config.site_dir) / "search"
    entries = json.loads((folder / "search_index.json").read_text())["docs"]
    pages = {entry["location"]: _plain(entry["title"]) for entry in entries if "#" not in entry["location"]}
    index = []
    for entry in entries:
        page = pages.get(entry["location"].partition("#")[0], "")
        section = _plain(entry["title"]) if "#" in entry["location"] else ""
        index.append([entry["location"], page, section, _plain(entry["text"])])
    (folder / "index.js").write_text(f"window.meshcraftIndex = {json.dumps(index, ensure_ascii=False)};\n")
    # `meshcraft site` takes this file as the sign that a build was complete.
    (folder / "search_index.json").write_text("{}\n")
