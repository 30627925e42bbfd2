"""The metadata of a model card: the YAML at its head, by which the Hub lists, licenses and links a model.

https://huggingface.co/docs/hub/model-cards describes the keys.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tpuconv.errors import SourceError
from tpuconv.jsonfile import read_bytes
from tpuconv.location import Location
from tpuconv.sources.companions import CARD, SOURCE_CARD

MAX_CARD_BYTES = 1 << 24
CARD_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""The keys of the source's card that hold for its conversions too."""
FENCE = "---\n"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""The name of a repository, or of a type: nothing in it is markup."""


def source_metadata(folder: Location, companions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the card of a source says that holds for its conversions too; nothing if there is no card, or if its
    metadata is no YAML.

    Args:
        folder: of a release, or of a checkpoint, which has the card under another name.
        companions: the files beside its weights.
    """
    name = next((name for name in (SOURCE_CARD, CARD) if name in companions), None)
    if name is None:
        return {}
    try:
        text = read_bytes(folder / name, MAX_CARD_BYTES, SourceError).decode().replace("\r\n", "\n")
        _, head, _ = text.split(FENCE, 2) if text.startswith(FENCE) else ("", "", "")
        found = yaml.safe_load(head)
    except (ValueError, yaml.YAMLError):  # of a text that is not UTF-8, or without an end of its metadata
        return {}
    return {key: found[key] for key in CARD_KEYS if _is_plain(found.get(key))} if isinstance(found, dict) else {}


def _is_plain(value: Any) -> bool:
    """Returns True for a text or a list of texts."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(each, str) and len(each) < 1000 for each in values)


def front_matter(manifest: Mapping[str, Any], kept: Mapping[str, Any], tags: tuple[str, ...], library: str = "") -> str:
    """Returns the metadata of an output as the head of its card.

    Args:
        manifest: of the output.
        kept: from `source_metadata`.
        tags: of the programs that load the output.
        library: the program that loads it, if there is one alone.
    """
    quantization = manifest.get("quantization") or {}
    qtypes = {
        facts["qtype"] for facts in quantization.get("parameters", {}).values() if HUB_NAME.fullmatch(facts["qtype"])
    }
    repo = manifest["source"]["repo"] or ""
    base = repo if HUB_NAME.fullmatch(repo) else ""
    facts = {
        **kept,
        **({"base_model": base} if base else {}),
        **({"base_model_relation": "quantized"} if base and "rules" in quantization else {}),
        **({"library_name": library} if library else {}),
        "tags": [*tags, *sorted(qtypes)],
    }
    return f"{FENCE}{yaml.safe_dump(facts, sort_keys=False)}{FENCE}\n"
