"""Dory: config and mapping table."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short
from tpuconv.models.common.defaults import family_config
from tpuconv.models.common.looped import LoopedConfig
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.rows import ATTENTION, MLP, MLP_BIAS, O_BIAS, QKV_BIAS
from tpuconv.models.common.windows import TwoRopesConfig
from tpuconv.models.registry import family
from tpuconv.notation.forms import Forms
from tpuconv.notation.table import Map, MappingTable, under

MLP_KIND = "mlp"
"""The entry of `layer_types` for an MLP, in a config.json that counts attention and MLP as two layers."""
LAYER_COUNTS = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
"""The keys that count such layers."""


@family_config
class Config(LoopedConfig, TwoRopesConfig):
    """The keys of config.json. Releases count attention and MLP as two layers, and list both in `layer_types`.
    `initializer_range` divides learned factors. The keys and values of a loop depend on how a text is cut into calls
    where all loops share them (`recurrent_kv_cache_mode`), which is refused."""

    model_type: ClassVar[str] = "dory"
    full_every: ClassVar[int] = 4
    only: ClassVar = {"rms_norm_eps": (1e-6,), "recurrent_kv_cache_mode": ("per_loop",)}
    least: ClassVar[Mapping[str, int]] = dict.fromkeys(LAYER_COUNTS[1:], 0)

    rms_norm_eps: float = 1e-6
    rope: Rope = Rope(theta=10_000_000.0)
    local_rope: Rope = Rope(theta=10_000.0)
    attention_bias: bool
    mlp_bias: bool
    initializer_range: float = 0.0177
    ngpt_alpha_init: float
    n_input_layers: int
    n_recurrent_layers: int | None
    n_output_layers: int
    n_recurrent_loops: int

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`, with attention and its MLP as one layer."""
        out = super().in_our_keys(raw)
        kinds = out.get("layer_types")
        if not isinstance(kinds, list) or MLP_KIND not in kinds:
            return out
        counts = {key: out[key] for key in LAYER_COUNTS if type(out.get(key)) is int}
        if len(kinds) % 2 or set(kinds[1::2]) != {MLP_KIND} or any(count % 2 for count in counts.values()):
            raise ConfigError(f"config.json: layer_types={short(kinds, 300)} is no list of pairs of attention and MLP")
        return out | {key: count // 2 for key, count in counts.items()} | {"layer_types": kinds[::2]}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.initializer_range <= 0:
            yield f"initializer_range={self.initializer_range} is not positive"
        if self.looped.start + len(self.looped) + self.n_output_layers != self.num_hidden_layers:
            yield (
                f"n_input_layers, n_recurrent_layers and n_output_layers do not count num_hidden_layers="
                f"{self.num_hidden_layers}"
            )

    @property
    def looped(self) -> range:
        """The layers that run `n_recurrent_loops` times."""
        first, count = self.n_input_layers, self.n_recurrent_layers
        if count is None:
            count = max(self.num_hidden_layers - first - self.n_output_layers, 0)
        return range(first, first + count)

    @property
    def executed_layers(self) -> tuple[int, ...]:
        layers = tuple(range(self.num_hidden_layers))
        return (*layers[: self.looped.start], *tuple(self.looped) * self.n_recurrent_loops, *layers[self.looped.stop :])

    @property
    def has_logits(self) -> bool:
        """True if there is a factor for each logit."""
        return not self.head.kind


def layer_rows(attention: str, mlp: str, alphas: tuple[str, str]) -> tuple[Map, ...]:
    """Returns the rows of a layer.

    Args:
        attention, mlp: the layers of the release that have attention and the MLP.
        alphas: the names of the rates of both, after these layers.
    """
    return (
        *under(
            attention,
            "layers.{L}",
            *ATTENTION,
            Map("self_attn.g_proj.weight", "attn.gate.kernel", "(N H) D -> D N H"),
            Map("self_attn.sqk", "attn.sqk", "(N H) -> N H"),
            Map("self_attn.s_gate", "attn.s_gate", "(N H) -> N H"),
            Map(alphas[0], "attn_alpha", "D"),
        ),
        *under(
            mlp,
            "layers.{L}",
            *under("mlp", "mlp", *MLP, Map("suv_gate", "suv_gate", "F"), Map("suv_up", "suv_up", "F")),
            Map(alphas[1], "mlp_alpha", "D"),
        ),
    )


def in_mixers(*rows: Map) -> tuple[Map, ...]:
    """Returns rows with the names of releases, which call attention and the MLP mixers."""

    def renamed(name: str) -> str:
        return name.replace(".self_attn.", ".mixer.").replace(".mlp.", ".mixer.")

    return tuple(replace(row, hf=tuple(map(renamed, row.hf_names))) for row in rows)


ATTENTION_LAYER, MLP_LAYER = "layers.{L+L}", "layers.{L+L+1}"
FORMS: tuple[Forms, ...] = (
    {
        "blocks": in_mixers(*layer_rows(ATTENTION_LAYER, MLP_LAYER, ("attn_alpha", "mlp_alpha"))),
        "layers": layer_rows("layers.{L}", "layers.{L}", ("lambda_1", "lambda_2")),
    },
    {
        "blocks": in_mixers(*under(ATTENTION_LAYER, "layers.{L}", *QKV_BIAS, O_BIAS)),
        "layers": under("layers.{L}", "layers.{L}", *QKV_BIAS, O_BIAS),
    },
    {
        "blocks": in_mixers(*under(f"{MLP_LAYER}.mlp", "layers.{L}.mlp", *MLP_BIAS)),
        "layers": under("layers.{L}.mlp", "layers.{L}.mlp", *MLP_BIAS),
    },
)
"""The rows of layers, of biases of attention and of biases of MLPs: in releases, which number attention and MLP as two
layers, and in transformers' own names."""
CONDITIONS = (None, "attention_bias", "mlp_bias")

TABLE = MappingTable(
    (
        Map("backbone.embeddings.weight", "embed.embedding", "V D"),
        *(
            replace(row, hf=tuple(f"backbone.{name}" for name in row.hf_names), when=condition)
            for forms, condition in zip(FORMS, CONDITIONS, strict=True)
            for row in forms["blocks"]
        ),
        Map("lm_head.weight", "lm_head.kernel", "V D -> D V", when="has_lm_head"),
        Map("lm_head.logit_scale", "logit_scale", "V", when="has_logits"),
    ),
    copies={"lm_head.weight": "backbone.embeddings.weight"},
)

FAMILY = family(
    Config,
    TABLE,
    "Dory",
    "DoryForCausalLM",
    forms=FORMS,
    aliases={
        "model.embed_tokens.weight": "backbone.embeddings.weight",
        "model.layers.#.self_attn.gate_proj.weight": "backbone.layers.#.self_attn.g_proj.weight",
    },
)
