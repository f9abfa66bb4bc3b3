"""The page of a course's own chapter as HTML, with formulas in MathML like those of the course's pages."""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import quote

PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>:root {{ color-scheme: light dark }} body {{ max-width: 46em; margin: 2em auto; padding: 0 1em;
font: 1rem/1.6 system-ui, sans-serif }} pre {{ overflow-x: auto }} .headerlink {{ display: none }}
math {{ font-family: math, "Cambria Math", "STIX Two Math", "Latin Modern Math", serif; font-size: 1.06em }}
math[display="block"] {{ display: block math; margin: 1.2em 0; overflow: auto hidden; padding-top: 0.3em }}
mfrac > :first-child {{ padding-bottom: 0.12em }} mfrac > :last-child {{ padding-top: 0.12em }}</style>
{body}
"""


def write_page(path: Path, folder: Path, name: str) -> list[str]:
    """Write a Markdown file as ``NAME.html``, with an index next to it.

    Returns:
        A sentence for each formula that cannot be read as LaTeX; the page shows it as it was typed.
    """
    from latex2mathml.converter import convert
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    problems: list[str] = []

    class Formulas(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return self._formula(body, "inline")

        def block_math(self, body: str) -> str:
            return self._formula(body, "block")

        def latex_environment(self, name: str, body: str) -> str:
            return self._formula(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")

        def _formula(self, body: str, display: str) -> str:
            try:
                return convert(body.strip(), display=display)
            except Exception as error:  # of many kinds, with no common base
                why = str(error) or type(error).__name__
                problems.append(f"{path}: the formula {body.strip()!r} cannot be read as LaTeX ({why}); correct it")
                return f"<code>{escape(body)}</code>"

    body = MarkdownWithMath(renderer=Formulas(escape=False)).render(path.read_text(encoding="utf-8"))
    body = body.replace('class="anchor-link"', 'class="headerlink"')
    (folder / f"{name}.html").write_text(PAGE.format(title=escape(name), body=body), encoding="utf-8")
    (folder / "index.html").write_text(f'<a href="{quote(name)}.html">{escape(name)}</a>', encoding="utf-8")
    return problems
