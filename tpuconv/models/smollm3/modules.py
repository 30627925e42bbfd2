"""SmolLM3: Llama, with some layers without rotary positions."""

from tpuconv.models.common.decoder import Decoder
from tpuconv.models.llama.modules import Block


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
