"""MiniMax-M3: the modules of the text model."""

from tpuconv.models.minimax_m3_vl_text import modules as minimax_m3_vl_text


class Model(minimax_m3_vl_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
