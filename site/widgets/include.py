"""MkDocs hook: add scripts and styles of the widgets to the site, under ``widgets/``."""

from pathlib import Path

from mkdocs.structure.files import File

FOLDER = Path(__file__).parent


def on_files(files, config, **_):
    """Add every script and style sheet in this folder."""
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in (".js", ".css"):
            files.append(File.generated(config, f"widgets/{path.name}", abs_src_path=str(path)))
    return files
