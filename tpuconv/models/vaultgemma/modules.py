"""VaultGemma (arXiv:2510.15001): Gemma 2 without the norms after each part."""

from typing import Any, ClassVar

from tpuconv.models.gemma import modules as gemma
from tpuconv.models.gemma2 import modules as gemma2


class Block(gemma.Block):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = gemma2.Attention


class Model(gemma2.Model):
    """Token ids [B, T] to logits [B, T, V], which have a soft limit."""

    block: ClassVar[Any] = Block
