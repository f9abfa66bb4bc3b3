"""Scripts, event handlers, frames, styles and javascript: links in the written answer; its page shows them as text.

group: reaches
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    script = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
    answer = next(
        cell for cell in notebook["cells"] if cell["metadata"].get("nbgrader", {}).get("grade_id") == "question"
    )
    answer["source"] = "\n\n".join(
        [
            script,
            "[link](javascript:document.title='run') <javascript:alert(1)> ![image](https://example.org/tracker.png)",
            "<a href='javascript:alert(1)' onmouseover=alert(1) style='position:fixed;inset:0'>everything</a>",
            "<svg><style><img title='</style><img src=x onerror=alert(1)>'></style></svg><math><mtext><script>1</script></mtext></math>",
            "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe><object data='data:text/html,x'></object>",
            "<meta http-equiv=refresh content='0;url=https://example.org'><base href='https://example.org/'>",
            "<form action='https://example.org'><input autofocus onfocus=alert(1)></form><link rel=stylesheet href=//example.org>",
            "$\\href{javascript:alert(1)}{x}$ <noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
            "\u202e reversed \x1b[31m",
        ]
    )
    (folder / released.name).write_text(json.dumps(notebook))
