"""Properties of a model that the code of programs takes for granted: no setting of theirs changes them.

Each is a text, which follows "only with", and a condition on the family's reading of config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

from tpuconv.models.common.rope import Rope

Needs = Mapping[str, Callable[[Any], bool]]
"""By the text, whether a property holds for a config."""


def full_attention_in_each(*periods: int) -> Needs:
    """Returns the need for windows in all layers but the last of each period, which has one of these lengths."""

    def holds(config: Any) -> bool:
        full = [window is None for window in config.windows]
        return any(full == [layer % period == period - 1 for layer in range(len(full))] for period in periods)

    return {f"a sliding window in all layers but the last of each {' or '.join(map(str, periods))}": holds}


def rope_of(*types: str) -> Needs:
    """Returns the need for rotary positions of one of these types of config.json."""
    return {f"rotary positions of type {' or '.join(types)}": lambda config: config.rope.type in types}


def yarn_scales(*, can_be_off: bool) -> Needs:
    """Returns the need for the usual attention factor of YaRN (arXiv:2309.00071), which a program may switch off."""

    def holds(config: Any) -> bool:
        rope = config.rope
        if rope.type != "yarn":
            return True
        usual = replace(rope, attention_factor=None, mscale=None, mscale_all_dim=None)
        given, factor = (each.inverse_frequencies(config.rope_dim)[1] for each in (rope, usual))
        return isclose(given, factor) or (can_be_off and isclose(given, 1.0))

    return {"the usual attention factor of YaRN" + (", or 1" if can_be_off else ""): holds}


def _is_each_nth(layers: Sequence[int], of: int) -> bool:
    """Returns True if layers are the last of each period of some length."""
    return not layers or tuple(layers) == tuple(range(layers[0], of, layers[0] + 1))


def _has_llama4_layers(config: Any) -> bool:
    layers = range(config.num_hidden_layers)
    without = [layer for layer in layers if not config.has_rope(layer)]
    return (
        _is_each_nth(config.layer_sets["J"], len(layers))
        and _is_each_nth(without, len(layers))
        and all(config.is_chunked(layer) == config.has_rope(layer) for layer in layers)
    )


def _shares_last_keys(config: Any) -> bool:
    own = config.num_hidden_layers - config.num_kv_shared_layers
    last = {"full_attention": own - 1, "sliding_attention": own - 2}
    return own == config.num_hidden_layers or all(last[kind] == layer for kind, layer in config.last_keys.items())


NO_WINDOWS: Needs = {"no sliding windows": lambda config: not any(config.windows)}
UNSCALED_ROPE: Needs = {"rotary positions without scaling": lambda config: config.rope.type == "default"}
LLAMA31 = Rope("llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
PLAIN_ATTENTION: Needs = {**NO_WINDOWS, **UNSCALED_ROPE}
ROPE_OF_HALVES: Needs = {**rope_of("default", "linear", "yarn"), **yarn_scales(can_be_off=True)}
"""Rotary positions of the halves of a head. In MaxText Llama 3.1 has adjacent pairs."""
ATTENTION_TO_ALL: Needs = {**NO_WINDOWS, **ROPE_OF_HALVES}
LLAMA31_ROPE: Needs = {
    "the rotary scaling of Llama 3.1": lambda config: (
        config.rope.type != "llama3" or config.rope == replace(LLAMA31, theta=config.rope.theta)
    )
}
USUAL_EPS: Needs = {"rms_norm_eps=1e-06": lambda config: config.rms_norm_eps == 1e-6}
GEMMA3_ATTENTION: Needs = {
    **rope_of("default", "linear"),
    "rotary positions without scaling in layers with a sliding window": lambda config: (
        config.local_rope.type == "default"
    ),
    "attention to earlier tokens alone": lambda config: config.use_bidirectional_attention is not True,
}
NORMALIZED: Needs = {"norm_topk_prob=true": lambda config: config.norm_topk_prob}
HAS_SHARED: Needs = {
    # Otherwise programs have arrays without elements.
    "shared experts": lambda config: bool(config.n_shared_experts) or not config.layer_sets["J"]
}
DENSE_FIRST: Needs = {
    "dense layers before all others": lambda config: [*config.layer_sets["I"]] == [*range(len(config.layer_sets["I"]))]
}
LLAMA4_LAYERS: Needs = {
    "experts in each n-th layer, and full attention without rotary positions in each n-th": _has_llama4_layers
}
DELTA_LAYERS: Needs = {
    "full attention in each n-th layer": lambda config: _is_each_nth(
        config.layer_sets["attention_layers"], config.num_hidden_layers
    )
}
DELTA_PERIOD: Needs = {
    "full attention in each 4th layer": lambda config: (
        [*config.layer_sets["attention_layers"]] == [*range(3, config.num_hidden_layers, 4)]
    )
}
GROUPED: Needs = {
    # Otherwise all three projections are one array, for which there is no table.
    "fewer heads of keys than of queries": lambda config: config.num_key_value_heads != config.num_attention_heads
}
WHOLE_VOCABULARY: Needs = {
    "vocab_size_per_layer_input=vocab_size": lambda config: (
        not config.has_layer_inputs or config.vocab_size_per_layer_input == config.vocab_size
    )
}
SHARED_KEYS: Needs = {
    "the keys and values of the last two layers with own ones for all later layers": _shares_last_keys
}
GEMMA3N_STREAMS: Needs = {
    "MLPs of one width": lambda config: len(set(config.widths)) == 1,
    "altup_active_idx=0 and altup_correct_scale": lambda config: (
        config.altup_active_idx == 0 and config.altup_correct_scale
    ),
    "rotary positions without scaling in layers with a sliding window": lambda config: (
        config.local_rope.type == "default"
    ),
}
HEAD_SCALE: Needs = {
    "query_pre_attn_scalar=head_dim": lambda config: (
        getattr(config, "query_pre_attn_scalar", config.head_dim) == config.head_dim
    )
}
QUERY_SCALE: Needs = {
    "query_pre_attn_scalar=head_dim or hidden_size / num_attention_heads": lambda config: (
        config.query_pre_attn_scalar in (config.head_dim, config.hidden_size // config.num_attention_heads)
    )
}
