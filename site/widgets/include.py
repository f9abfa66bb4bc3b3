"""MkDocs hook: scripts and styles of the widgets become part of the site, under ``widgets/``."""

from pathlib import Path

from mkdocs.structure.files import File

FOLDER = Path(__file__).parent


def on_files(files, config, **_):
    """Add every script and style sheet that lies beside this file."""
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in (".js", ".css"):
            files.append(File.generated(config, f"widgets/{path.name}", abs_src_path=str(path)))
    return files
