"""Makes pages of the site from files outside of docs/, and their links with them. Called by mkdocs (mkdocs.yml).

Links are relative to the file that they are in, so that they work in the repository too. A link to a page becomes one
within the site. A link to another file of the repository becomes its text. A link to nothing is a warning, which ends
the build.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "example.md": "examples/README.md",
    "getting-started.md": "examples/first_steps.ipynb",
}
"""From a page of the site to the file that it is made of."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.tpuconv")


def on_files(files: Files, config: Any) -> Files:
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=text_of(ROOT / source)))
    return files


def text_of(path: Path) -> str:
    """Returns the Markdown of a file; of a notebook its cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    names = {ROOT / own: name for name, own in PAGES.items()}

    def relinked(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if "://" in target:
            return match[0]
        path = (source.parent / target).resolve()
        if not path.exists():
            log.warning("%s links to %s, which is not there", source.relative_to(ROOT), target)
        elif name := names.get(path) or (
            str(path.relative_to(ROOT / "docs")) if path.is_relative_to(ROOT / "docs") else ""
        ):
            relative = os.path.relpath(name, Path(page.file.src_uri).parent)
            return f"{image}[{text}]({relative}{anchor or ''})"
        return text

    return LINK.sub(relinked, markdown)
