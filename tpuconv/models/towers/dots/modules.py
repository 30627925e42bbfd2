"""The tower of dots.ocr."""

from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.towers.qwen_vit.modules import QwenVit, gated_block
from tpuconv.models.towers.vit import Block


class DotsVit(QwenVit):
    """The tower of dots.ocr: RMS norms of the patches, in the layers and behind them, and gated MLPs without biases."""

    has_patch_bias = True

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        norm = partial(RMSNorm, "D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.patch_norm, self.norm = norm(), norm()

    def block(self, config: Any, dtype: DTypeLike, keys: Keys) -> Block:
        return gated_block(config, dtype, keys)

    def embedded(self, patches_PC: jax.Array, index_PA: jax.Array, weight_PA: jax.Array) -> jax.Array:
        return self.patch_norm(super().embedded(patches_PC, index_PA, weight_PA))

    def ended(self, x_BPD: jax.Array) -> Any:
        return self.projector(self.norm(x_BPD))
