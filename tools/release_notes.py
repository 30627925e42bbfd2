"""Prints the section of CHANGELOG.md of a release: `python tools/release_notes.py v0.1.0`. Ends with an error if the
tag is not the version of pyproject.toml, or CHANGELOG.md has no section for it."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def release_notes(tag: str, changelog: str, version: str) -> str:
    """Returns the section of a version.

    Raises:
        ValueError: the tag is another version's, or there is no section.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag {tag} is not v{version}, the version of pyproject.toml")
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md has no section [{version}]: rename [Unreleased]")
    return found[1].strip() + "\n"


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        print(
            release_notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), project["version"]), end=""
        )
    except ValueError as error:
        sys.exit(str(error))
