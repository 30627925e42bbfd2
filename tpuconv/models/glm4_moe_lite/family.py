"""GLM-4.7-Flash: DeepSeek V3 with other sizes."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tpuconv.models.common.defaults import family_config
from tpuconv.models.deepseek_v3 import family as deepseek_v3
from tpuconv.models.registry import family


@family_config
class Config(deepseek_v3.Config):
    """The keys of config.json. `mlp_layer_types` says which layers have experts; in files without it the first
    `first_k_dense_replace` have none."""

    model_type: ClassVar[str] = "glm4_moe_lite"

    first_k_dense_replace: int = 1
    mlp_layer_types: tuple[str, ...] | None
    head_dim: int | None = None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        out, kinds = super().in_our_keys(raw), raw.get("mlp_layer_types")
        if isinstance(kinds, list):
            out.setdefault("first_k_dense_replace", [*kinds, "sparse"].index("sparse"))
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.head_dim not in (None, self.qk_rope_head_dim):  # transformers reads it as `qk_rope_head_dim`
            yield f"head_dim={self.head_dim} is not qk_rope_head_dim={self.qk_rope_head_dim}"
        kinds, dense = self.mlp_layer_types, self.first_k_dense_replace
        if kinds is not None and kinds != ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense):
            yield (
                f"mlp_layer_types is not 'dense' for first_k_dense_replace={dense} layers, then 'sparse', for "
                f"{self.num_hidden_layers} layers"
            )


TABLE = deepseek_v3.TABLE

FAMILY = family(Config, TABLE, "GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", model="deepseek_v3")
