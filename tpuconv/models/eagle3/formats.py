"""config.json of EAGLE-3 drafts in the formats of speculators and of SGLang."""

from collections.abc import Mapping
from typing import Any

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.config_keys import unnested
from tpuconv.models.eagle3.family import COUNT_OF_STATES, DEFAULT_STATES, EAGLE_CONFIG, LAYER_CONFIG, LAYER_IDS, Config
from tpuconv.sources.config import DTYPE_KEYS, ENCODING_KEYS

EAGLE3 = Config.model_type
SPECULATORS, SGLANG = "speculators", "sglang"
"""The formats of drafts."""
OF_DRAFT = (
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "tie_word_embeddings"),
    *("speculators_config", "speculators_model_type", "speculators_version", "embed_requires_grad", "fc_norm"),
    *("norm_output", "architectures", "auto_map", "transformers_version", LAYER_IDS, EAGLE_CONFIG, COUNT_OF_STATES),
    *(*DTYPE_KEYS, *ENCODING_KEYS),
)
"""Keys of a draft that its layer does not have."""
VERSION, SPECULATIVE_TOKENS = "0.3.0", 3


def in_format(raw: Mapping[str, Any], form: str, target: str | None) -> dict[str, Any]:
    """Returns a parsed config.json in another format.

    Args:
        raw: of a draft.
        form: `SPECULATORS` or `SGLANG`.
        target: the name of the target; None for the name that config.json has.

    Raises:
        UsageError: config.json of the format names the target, and there is no name.
        UnsupportedConfig: the format cannot describe the draft.
    """
    config = Config.from_hf(raw)
    keys = unnested(raw, LAYER_CONFIG)
    beside = {key: raw[key] for key in (*DTYPE_KEYS, *ENCODING_KEYS) if key in raw}
    layer = {"model_type": "llama", **{key: value for key, value in keys.items() if key not in OF_DRAFT}}
    of_draft: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "tie_word_embeddings": False,
    }
    if config.target_hidden_size is not None:
        of_draft["target_hidden_size"] = config.target_hidden_size
    if form == SPECULATORS:
        ids = {} if config.state_layers is None else {LAYER_IDS: list(config.state_layers)}
        if config.state_layers and len(config.state_layers) != len(DEFAULT_STATES):
            layer[COUNT_OF_STATES] = len(config.state_layers)
        norms = {"norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc}
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "speculators_config": with_verifier(raw.get("speculators_config"), target, EAGLE3, SPECULATIVE_TOKENS),
            LAYER_CONFIG: layer,
            **of_draft,
            **norms,
            **ids,
            **beside,
        }
    if config.norm_before_residual or config.norm_before_fc or 0 in (config.state_layers or ()):
        raise UnsupportedConfig(
            "SGLang's format has no drafts with norm_before_residual or norm_before_fc, or that read embeddings",
            hint=f'give `form="{SPECULATORS}"`',
        )
    inside: dict[str, Any] = {"use_aux_hidden_state": True}
    if config.state_layers is not None:
        inside[LAYER_IDS] = [number - 1 for number in config.state_layers]
        of_draft[LAYER_IDS] = list(config.state_layers)  # vLLM does not read those inside
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **of_draft, EAGLE_CONFIG: inside, **beside}


def with_verifier(known: Any, target: str | None, algorithm: str, tokens: int) -> dict[str, Any]:
    """Returns `speculators_config`, of the source or a new one, with the name of the target.

    Args:
        known: of the source.
        target: the name; None for the name of the source.
        algorithm, tokens: the kind of draft, and how many tokens it drafts.

    Raises:
        UsageError: there is no name.
    """
    if isinstance(known, Mapping) and target is None:
        return dict(known)
    if target is None:
        raise UsageError(
            "config.json of speculators names the target of a draft, which this draft does not",
            hint='give `draft_for="ORG/TARGET"`',
        )
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0}
    begun = {
        "algorithm": algorithm,
        "proposal_methods": [{**proposal, "verifier_accept_k": 1}],
        "default_proposal_method": "greedy",
    }
    known = known if isinstance(known, Mapping) else {}
    return {**begun, **known, "verifier": {"architectures": [], "name_or_path": target}}
