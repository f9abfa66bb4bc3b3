"""MkDocs hook: formulas become MathML when the site is built, so that a page needs no script to show them.

Pages write ``$...$`` and ``$$...$$``; ``pymdownx.arithmatex`` marks them, and the marks are replaced here.
"""

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.+?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.+?)\\\]</div>', re.DOTALL)


def on_page_content(content, page, **_):
    """Replace every marked formula of a page.

    Raises:
        ValueError: A formula has a mark that this hook does not know.
    """
    content = _INLINE.sub(lambda match: convert(html.unescape(match[1]).strip()), content)
    content = _BLOCK.sub(lambda match: convert(html.unescape(match[1]).strip(), display="block"), content)
    if 'class="arithmatex"' in content:
        raise ValueError(f"{page.file.src_uri}: a formula was not converted to MathML")
    return content
