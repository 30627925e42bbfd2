"""Qwen3.5, dense, the text model: Qwen3-Next without experts."""

from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import CenteredRMSNorm
from tpuconv.models.qwen3_next.modules import HybridBlock, new_cache


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = HybridBlock
    norm_type = CenteredRMSNorm
    cached = staticmethod(new_cache)
