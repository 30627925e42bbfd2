"""Qwen3.5, dense, the text model: Qwen3-Next without experts."""

from tpuconv.models.qwen3_next.modules import DeltaBlock, DeltaDecoder


class Model(DeltaDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = DeltaBlock
