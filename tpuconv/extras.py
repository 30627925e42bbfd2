"""Commands that install the optional packages of tpuconv (its extras)."""

import json
from contextlib import suppress
from shlex import quote
from urllib.parse import unquote, urlsplit

EXTRAS = {
    **{"libtpu": "tpu", "lm_eval": "eval", "obstore": "cloud", "ray": "ray", "model_signing": "sign"},
    **dict.fromkeys(("PIL", "pillow", "torch", "transformers"), "hf"),
}
"""The extra that has a module or a package."""


def install_command(extra: str) -> str:
    """Returns the command that installs an extra. tpuconv is installed again from where it came from, which pip notes
    unless that was an index (https://packaging.python.org/specifications/direct-url): a clone, a file, a repository."""
    from importlib import metadata  # imports much, and each start of a command imports this module

    found = None
    with suppress(metadata.PackageNotFoundError, ValueError):
        found = json.loads(metadata.distribution("tpuconv").read_text("direct_url.json") or "null")
    if not isinstance(found, dict) or not isinstance(url := found.get("url"), str):
        return f"pip install {quote(f'tpuconv[{extra}]')}"
    if url.startswith("file:"):
        editable = "-e " if (found.get("dir_info") or {}).get("editable") else ""
        return f"pip install {editable}{quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    vcs = found.get("vcs_info") or {}
    place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if {"vcs", "commit_id"} <= set(vcs) else url
    return f"pip install {quote(f'tpuconv[{extra}] @ {place}')}"
