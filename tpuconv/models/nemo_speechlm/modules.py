"""Nemotron 3.5 Transcribe: the modules of Nemotron-H, without those for multi-token prediction."""

from tpuconv.models.nemotron_h import modules as nemotron_h


class Model(nemotron_h.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    mtp_type = None
