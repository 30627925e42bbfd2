"""How work is divided, in bytes. All are part of a plan's fingerprint."""

from tpuconv.checkpoint import shards

CHUNK_BYTES = shards.CHUNK_BYTES
"""Chunks are what a device reads: larger ones are cut further, so that it reads little that it does not need."""
SLAB_BYTES = 32 << 20
"""What is read, transformed and written in one go."""
UNIT_BYTES = 256 << 20
"""What a rerun does again or not."""
