"""config.json of DSpark drafts in the formats of speculators and of DeepSpec, which vLLM and SGLang read."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.dflash.family import OF_MODEL
from tpuconv.models.dflash.formats import keys_beside, keys_of_layers, speculators_format
from tpuconv.models.dspark.family import KINDS_OF_HEADS, SPARK_CONFIG, Config
from tpuconv.models.eagle3.formats import SPECULATORS

OF_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "num_anchors")
"""Keys of the two heads, and of training."""


def dspark_format(raw: Mapping[str, Any], form: str, target: str | None) -> dict[str, Any]:
    """Returns a parsed config.json in another format; arguments are as of `tpuconv.models.eagle3.formats.in_format`.

    Raises:
        UsageError: config.json of the format names the target, and there is no name.
        UnsupportedConfig: the format cannot describe the draft.
    """
    config, raw = Config.from_hf(raw), unnested(raw, SPARK_CONFIG)
    layers = keys_of_layers(raw, *OF_HEADS)
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type or KINDS_OF_HEADS[0],
        "enable_confidence_head": raw.get("enable_confidence_head", True),
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
    if form == SPECULATORS:
        heads["sample_from_anchor"] = config.sample_from_anchor
        return speculators_format(raw, config, target, ("DSparkDraftModel", "dspark"), layers, **heads)
    if config.draft_vocab_size not in (None, config.vocab_size) or not config.sample_from_anchor:
        raise UnsupportedConfig(
            "DeepSpec's format has no drafts with a part of the vocabulary, or whose last token drafts none",
            hint=f'give `form="{SPECULATORS}"`',
        )
    block = {"block_size": config.block_size, "mask_token_id": config.mask_token_id}
    causal = {} if config.is_causal is None else {"is_causal": config.is_causal}
    states = {OF_MODEL: [layer - 1 for layer in config.state_layers]}
    return {"architectures": ["Qwen3DSparkModel"], **layers, **causal, **block, **states, **heads, **keys_beside(raw)}
