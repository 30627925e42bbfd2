"""GPT-Neo: config and mapping table."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.mapping.table import Map
from tpuconv.models.common.config import MOST_IN_A_LIST
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import GELU_TANH, GPT_MLP, GPT_NORMS, POSITIONS, PositionedConfig, gpt_table
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.registry import family

GLOBAL_AND_LOCAL = ("global", "local")


@family_config
class Config(PositionedConfig):
    """The keys of config.json. `attention_layers` are the kinds of the layers that `attention_types` lists in a shorter
    way: those that are "local" have a window."""

    model_type: ClassVar[str] = "gpt_neo"
    only: ClassVar = {"activation_function": GELU_TANH}
    hf_names: ClassVar = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    left_out: ClassVar = frozenset({"attention_types", "embed_dropout", "resid_dropout", "classifier_dropout"})

    window_size: int
    attention_layers: tuple[str, ...] = GLOBAL_AND_LOCAL * 12

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out = super().in_our_keys(raw)
        types = raw.get("attention_types")
        if types is None:
            out.pop("attention_layers", None)
            return out
        try:
            repeated = [(list(kinds), count) for kinds, count in types]
            if any(type(count) is not int for _, count in repeated):
                raise TypeError
        except (TypeError, ValueError):
            raise ConfigError(f"config.json: attention_types={short(types)} is no list of [kinds, count]") from None
        if any(count > MOST_IN_A_LIST or len(kinds) > MOST_IN_A_LIST for kinds, count in repeated):
            raise ConfigError(f"config.json: attention_types={short(types)} lists too many layers")
        out["attention_layers"] = [kind for kinds, count in repeated for kind in kinds * count]
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from faults_of_kinds("attention_types", self.attention_layers, self.num_hidden_layers, GLOBAL_AND_LOCAL)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window_size if kind == "local" else None for kind in self.attention_layers)


TABLE = gpt_table(
    (
        *GPT_NORMS,
        Map("attn.attention.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
        Map("attn.attention.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
        Map("attn.attention.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
        Map("attn.attention.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
        Map("attn.attention.out_proj.bias", "attn.o.bias", "D"),
        *GPT_MLP,
    ),
    others=(POSITIONS,),
    masks="attn.attention.",
)

FAMILY = family(Config, TABLE, "GPT-Neo", "GPTNeoForCausalLM")
