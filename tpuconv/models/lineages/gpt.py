"""GPT-2, GPT-J, GPT-NeoX and other families of their time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.gpt import (
    GELU_TANH,
    GPT2_ATTENTION,
    GPT2_MLP,
    GPT_KEYS,
    GPT_MLP,
    GPT_NORMS,
    GPT_QKV,
    GPT_QKV_BIAS,
    NEOX_ATTENTION,
    NEOX_ATTENTION_BIAS,
    NEOX_MLP,
    POSITIONS,
    PositionedConfig,
    gpt_table,
    norm_rows,
)
from tpuconv.models.common.key_types import MOST_IN_A_LIST
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.partial_rope import PartialRopeConfig
from tpuconv.models.common.rows import PRE_NORM_BIASES, PRE_NORMS, when
from tpuconv.models.declare import decoder
from tpuconv.models.parts import Attn, Mlp, Norms
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import Map, MappingTable, under

declare(
    fused_groups=Word("groups of heads in a fused projection", as_="K"),
    fused_heads=Word("heads of each of these groups"),
    biased_layers=Word("layers whose attention has a bias of its output"),
)

POSITIONED = "modules.gpt:PositionedDecoder"


@family_config
class Gpt2Config(PositionedConfig):
    """The factor of scores may differ between layers."""

    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool

    @property
    def score_scales(self) -> list[float]:
        """The factor of scores of each layer."""
        scale = self.sizes["H"] ** -0.5 if self.scale_attn_weights else 1.0
        by_layer = self.scale_attn_by_inverse_layer_idx
        return [scale / (layer + 1 if by_layer else 1) for layer in range(self.num_hidden_layers)]

    @property
    def unscannable(self) -> str:
        """Why `scan_layers` is impossible; empty if it is possible."""
        return "its layers scale scores differently" if self.scale_attn_by_inverse_layer_idx else super().unscannable


GPT2 = decoder(
    "gpt2",
    "GPT-2",
    "GPT2LMHeadModel",
    Norms(kind="layer", module="modules.gpt:ScaledScoresBlock"),
    Attn(True),
    Mlp("plain", "gelu_tanh", bias=True),
    base=POSITIONED,
    config=Gpt2Config,
    only={"activation_function": GELU_TANH, "add_cross_attention": (False,)},
    hf_names=GPT_KEYS,
    left_out=frozenset({"n_ctx", "reorder_and_upcast_attn"}),
    table=gpt_table(
        (*GPT_NORMS, *GPT2_ATTENTION, *GPT2_MLP),
        others=(POSITIONS,),
    ),
)


class OneKeyHead(PositionedConfig):
    """All heads share one key and one value."""

    @property
    def key_heads(self) -> int:
        return 1


GPT_BIGCODE = GPT2.but(
    "gpt_bigcode",
    "StarCoder, SantaCoder",
    "GPTBigCodeForCausalLM",
    Norms(kind="layer"),
    config=OneKeyHead,
    only={
        "activation_function": GELU_TANH,
        "scale_attn_weights": (True,),
        "multi_query": (True,),
        "add_cross_attention": (False,),
    },
    hf_names=GPT_KEYS,
    left_out=frozenset({"n_ctx", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"}),
    table=gpt_table(
        (
            *GPT_NORMS,
            Map("attn.c_attn.weight", GPT_QKV, "((N + K + K) H) D -> D N H, D K H, D K H"),
            Map("attn.c_attn.bias", GPT_QKV_BIAS, "((N + K + K) H) -> N H, K H, K H"),
            Map("attn.c_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
            Map("attn.c_proj.bias", "attn.o.bias", "D"),
            *GPT_MLP,
        ),
        others=(POSITIONS,),
    ),
)


@family_config
class GptJConfig(DecoderConfig):
    """Without `n_inner` an MLP is four times as wide as the model."""

    intermediate_size: int | None  # type: ignore[assignment]  # others' is never absent
    rotary_dim: int

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            yield f"num_key_value_heads={self.num_key_value_heads} is not n_head={self.num_attention_heads}"
        if self.rotary_dim > self.sizes["H"]:
            yield f"rotary_dim={self.rotary_dim} is more than a head has"

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "F": self.intermediate_size or 4 * self.hidden_size}

    @property
    def rope_dim(self) -> int:
        return self.rotary_dim

    @property
    def has_head_bias(self) -> bool:
        return self.has_lm_head


UNFUSED_ROWS = (
    *norm_rows("ln_1", "norm"),
    Map("attn.out_proj.weight", "attn.o.kernel", "D (N H) -> N H D"),
    Map("mlp.fc_in.weight", "mlp.up.kernel", "F D -> D F"),
    Map("mlp.fc_in.bias", "mlp.up.bias", "F"),
    Map("mlp.fc_out.weight", "mlp.down.kernel", "D F -> F D"),
    Map("mlp.fc_out.bias", "mlp.down.bias", "D"),
)
HEAD_ROWS = (Map("lm_head.bias", "lm_head.bias", "V", when="has_head_bias"),)

GPTJ = decoder(
    "gptj",
    "GPT-J 6B",
    "GPTJForCausalLM",
    Norms("parallel", "layer"),
    Attn(rope="pairs"),
    Mlp("plain", "gelu_tanh", bias=True),
    config=GptJConfig,
    defaults={"num_key_value_heads": None},
    only={
        "activation_function": GELU_TANH,
        "rotary": (True,),
        "scale_attn_weights": (True,),
        "tie_word_embeddings": (False,),
    },
    hf_names=GPT_KEYS,
    derived=DecoderConfig.derived | {"head_dim"},
    table=gpt_table(
        (
            Map("attn.q_proj.weight", "attn.q.kernel", "(N H) D -> D N H"),
            Map("attn.k_proj.weight", "attn.k.kernel", "(K H) D -> D K H"),
            Map("attn.v_proj.weight", "attn.v.kernel", "(K H) D -> D K H"),
            *UNFUSED_ROWS,
        ),
        head=HEAD_ROWS,
    ),
)

GROUPS = 4
"""The number of groups of heads in CodeGen's fused projection."""


class InGroups:
    """Heads are in as many groups."""

    num_attention_heads: int

    def contradictions(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions`."""
        yield from super().contradictions()  # type: ignore[misc]
        if self.num_attention_heads % GROUPS:
            yield f"n_head={self.num_attention_heads} is not a multiple of {GROUPS}"

    @property
    def sizes(self) -> dict[str, int]:
        """See `DecoderConfig.sizes`."""
        return {**super().sizes, "fused_groups": GROUPS, "fused_heads": self.num_attention_heads // GROUPS}  # type: ignore[misc]


CODEGEN = GPTJ.but(
    "codegen",
    "CodeGen",
    "CodeGenForCausalLM",
    config=(InGroups, GPTJ.config),
    left_out=frozenset({"n_ctx"}),
    table=gpt_table(
        (
            # Of each group the queries, then the values, then the keys.
            Map(
                "attn.qkv_proj.weight",
                ("attn.q.kernel", "attn.v.kernel", "attn.k.kernel"),
                "(fused_groups (fused_heads + fused_heads + fused_heads) H) D "
                "-> D (fused_groups fused_heads) H, D (fused_groups fused_heads) H, D (fused_groups fused_heads) H",
            ),
            *UNFUSED_ROWS,
        ),
        head=HEAD_ROWS,
    ),
)

NEOX_NAMES = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
"""Keys of older files."""


def with_neox_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parsed config.json with `NEOX_NAMES` where the keys that they stand for are absent."""
    given = {key: raw[old] for old, key in NEOX_NAMES.items() if raw.get(old) is not None}
    return {**given, **raw}


@family_config
class NeoxConfig(PartialRopeConfig):
    """Every head has keys and values of its own."""

    use_parallel_residual: bool

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(with_neox_names(raw))


def neox_table(front: str, rows: tuple[Map, ...], *others: Map) -> MappingTable:
    """Returns the table of a family with the names of GPT-NeoX.

    Args:
        front: the prefix of the model without its head.
        rows: of each layer besides its norms, without prefixes.
        others: rows with their prefixes.
    """
    return MappingTable(
        (
            Map(f"{front}embed_in.weight", "embed.embedding", "V D"),
            *under(f"{front}layers.{{L}}", "layers.{L}", *PRE_NORMS, *PRE_NORM_BIASES, *rows),
            *others,
            *norm_rows(f"{front}final_layer_norm", "norm"),
            Map("embed_out.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        ),
        ignore={
            f"{front}layers.{{L}}.attention.bias": "the causal mask",
            f"{front}layers.{{L}}.attention.masked_bias": "the score of a masked key",
        },
        copies={"embed_out.weight": f"{front}embed_in.weight"},
    )


GPT_NEOX = decoder(
    "gpt_neox",
    "GPT-NeoX-20B, Pythia",
    "GPTNeoXForCausalLM",
    Norms(kind="layer", module="modules.gpt:SummedBlock"),
    Attn("attention_bias"),
    Mlp("plain", "gelu", bias=True),
    config=NeoxConfig,
    defaults={"num_key_value_heads": None, "partial_rotary_factor": 0.25},
    only={"hidden_act": ("gelu",)},
    hf_names={"rms_norm_eps": "layer_norm_eps"},
    left_out=frozenset({*NEOX_NAMES, "num_key_value_heads"}),
    table=neox_table(
        "gpt_neox.",
        (
            *under("attention", "attn", *NEOX_ATTENTION, *when("attention_bias", *NEOX_ATTENTION_BIAS)),
            *under("mlp", "mlp", *NEOX_MLP),
        ),
    ),
)


@family_config
class NeoxJapaneseConfig(PartialRopeConfig):
    """The attention of the last layer has a bias of its output."""

    intermediate_multiple_size: int
    intermediate_size: int | None = None  # type: ignore[assignment]  # others' is never absent

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().in_our_keys(with_neox_names(raw))

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {**super().layer_sets, "biased_layers": (self.num_hidden_layers - 1,)}

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "F": self.intermediate_multiple_size * self.hidden_size}


GPT_NEOX_JAPANESE = decoder(
    "gpt_neox_japanese",
    "GPT-NeoX Japanese 2.7B",
    "GPTNeoXJapaneseForCausalLM",
    Norms(kind="layer", module="modules.gpt:LastBiasBlock"),
    Attn(),
    Mlp("plain", "gelu"),
    config=NeoxJapaneseConfig,
    defaults={"num_key_value_heads": None, "partial_rotary_factor": 1.0, "head_dim": None},
    only={"hidden_act": ("gelu",)},
    hf_names={"rms_norm_eps": "layer_norm_eps"},
    derived=PartialRopeConfig.derived | {"intermediate_size", "num_key_value_heads", "head_dim"},
    left_out=frozenset(NEOX_NAMES),
    table=neox_table(
        "gpt_neox_japanese.",
        (
            *under("attention", "attn", *NEOX_ATTENTION),
            *under("mlp", "mlp", *(row for row in NEOX_MLP if row.hf_names[0].endswith("weight"))),
        ),
        Map("gpt_neox_japanese.layers.{biased_layers}.attention.dense_bias", "layers.{biased_layers}.attn.o.bias", "D"),
    ),
)

GLOBAL_AND_LOCAL = ("global", "local")


@family_config
class GptNeoConfig(PositionedConfig):
    """`attention_layers` are the kinds of the layers that `attention_types` lists in a shorter
    way: those that are "local" have a window."""

    window_size: int
    attention_layers: tuple[str, ...] = GLOBAL_AND_LOCAL * 12

    @property
    def score_scale(self) -> float:
        """The factor of scores."""
        return 1.0

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


GPT_NEO = GPT2.but(
    "gpt_neo",
    "GPT-Neo",
    "GPTNeoForCausalLM",
    Norms(kind="layer"),
    Attn(out_bias=True, scale="score_scale"),
    config=GptNeoConfig,
    only={"activation_function": GELU_TANH},
    hf_names={
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    left_out=frozenset({"attention_types", "embed_dropout", "resid_dropout", "classifier_dropout"}),
    table=gpt_table(
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
    ),
)
