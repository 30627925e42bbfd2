"""Llama Nemotron, whose layers a search of architectures chose."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.key_types import object_of
from tpuconv.models.common.rows import ATTENTION, ATTN_NORM, MLP, MLP_NORM, decoder_table
from tpuconv.models.lineages.llama import LLAMA, NO_BIAS
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, under

declare(
    attention_blocks=Word("layers with attention, in a model where others have a matrix in its place, or nothing"),
    linear_blocks=Word("layers with a matrix in place of attention"),
    mlp_blocks=Word("layers with an MLP, in a model where others have none"),
)


@family_config
class NasConfig(DecoderConfig):
    """The layers differ, as a search of architectures chose them (arXiv:2411.19146): in key-value heads and in the
    width of the MLP, and some have a matrix in place of attention, or no attention, or no MLP.

    Attributes:
        block_kv_heads: for each layer the number of key-value heads, 0 for a matrix, None without attention.
        block_widths: for each layer the width of its MLP, None without.
    """

    only: ClassVar = NO_BIAS
    left_out: ClassVar[frozenset[str]] = frozenset({"block_configs"})
    settled_keys: ClassVar[frozenset[str]] = frozenset({"block_kv_heads", "block_widths"})

    intermediate_size: int = 11008
    block_kv_heads: tuple[int | None, ...] = (32,) * 32
    block_widths: tuple[int | None, ...] = (11008,) * 32

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, blocks = super().in_our_keys(raw), raw.get("block_configs")
        if blocks is None:
            return out
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise ConfigError(f"config.json: block_configs={short(blocks)} is not a list with an object for each layer")
        heads, width = (out.get(key, getattr(cls, key)) for key in ("num_attention_heads", "hidden_size"))
        if type(heads) is not int or type(width) is not int:
            return out  # which is refused with the other wrong types
        kv_heads, widths = [_kv_heads(each, heads) for each in blocks], [_mlp_width(each, width) for each in blocks]
        largest = {"num_key_value_heads": max(filter(None, kv_heads), default=heads)}
        largest["intermediate_size"] = max(filter(None, widths), default=1)
        return {**out, **largest, "block_kv_heads": kv_heads, "block_widths": widths}

    def contradictions(self) -> Iterator[str]:
        if len(self.block_widths) != self.num_hidden_layers:
            yield f"block_configs has {len(self.block_widths)} entries for num_hidden_layers={self.num_hidden_layers}"
        else:
            yield from super().contradictions()

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "A": self.hidden_size}

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        heads = list(enumerate(self.block_kv_heads))
        return {
            **super().layer_sets,
            "attention_blocks": tuple(layer for layer, count in heads if count),
            "linear_blocks": tuple(layer for layer, count in heads if count == 0),
            "mlp_blocks": tuple(layer for layer, width in enumerate(self.block_widths) if width),
        }

    @property
    def layer_sizes(self) -> Mapping[int, Mapping[str, int]]:
        usual, found = self.sizes, {}
        for layer, (heads, width) in enumerate(zip(self.block_kv_heads, self.block_widths, strict=True)):
            own = {"K": heads or usual["K"], "F": width or usual["F"]}
            if any(usual[letter] != size for letter, size in own.items()):
                found[layer] = {**own, "G": usual["N"] // own["K"]}
        return found


def _block_part(block: Mapping[str, Any], part: str, read: Sequence[str]) -> dict[str, Any]:
    """Returns an object of an entry of `block_configs`, without the keys that are null or false.

    Raises:
        UnsupportedConfig: it has a key that is neither of these nor among the keys `read`.
    """
    given = {key: value for key, value in object_of(block, part).items() if value not in (None, False)}
    if unread := [f"{key}={short(value)}" for key, value in given.items() if key not in read]:
        raise UnsupportedConfig(f"block_configs: {', '.join(unread)} of {part!r} is not implemented")
    return given


def _kv_heads(block: Mapping[str, Any], heads: int) -> int | None:
    """Returns the number of key-value heads of a layer; 0 for a matrix in place of attention, None for neither."""
    given = _block_part(block, "attention", ("no_op", "replace_with_linear", "n_heads_in_group"))
    if "no_op" in given or "replace_with_linear" in given:
        return None if "no_op" in given else 0
    group = given.get("n_heads_in_group")
    if type(group) is not int or group < 1 or heads % group:
        raise ConfigError(f"block_configs: n_heads_in_group={short(group)} does not divide num_attention_heads={heads}")
    return heads // group


def _mlp_width(block: Mapping[str, Any], width: int) -> int | None:
    """Returns the width of the MLP of a layer; None without. `ffn_mult` is its width in units of two thirds of the
    model's `width`, up to the next multiple of 256."""
    given = _block_part(block, "ffn", ("no_op", "ffn_mult", "intermediate_size", "hidden_act"))
    if "no_op" in given:
        return None
    if given.get("hidden_act", "silu") != "silu":
        raise UnsupportedConfig(f"block_configs: hidden_act={short(given['hidden_act'])} is not implemented")
    factor, found = given.get("ffn_mult"), given.get("intermediate_size")
    if isinstance(factor, int | float) and 0 < factor < width:
        return -(-int(2 * factor * width / 3) // 256) * 256
    if type(found) is not int or found < 1:
        raise ConfigError(f"block_configs: {short(block['ffn'])} gives no width of an MLP")
    return found


NEMOTRON_NAS = LLAMA.but(
    "nemotron-nas",
    "Llama Nemotron Super 49B, 51B, Ultra 253B",
    "DeciLMForCausalLM",
    Norms(module="modules.like_llama:ChosenBlock"),
    Attn(),
    Mlp(),
    base="modules.like_llama:ChosenLayers",
    config=NasConfig,
    table=decoder_table(
        others=(
            *under("model.layers.{attention_blocks}", "layers.{attention_blocks}", ATTN_NORM, *ATTENTION),
            *under(
                "model.layers.{linear_blocks}",
                "layers.{linear_blocks}",
                ATTN_NORM,
                Map("self_attn.linear_attn.weight", "attn.linear.kernel", "D A -> A D"),
            ),
            *under("model.layers.{mlp_blocks}", "layers.{mlp_blocks}", MLP_NORM, *under("mlp", "mlp", *MLP)),
        )
    ),
    defaults={
        **{"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    },
)
