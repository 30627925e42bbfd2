"""How work is divided, in bytes. The sizes are part of a plan's fingerprint."""

CHUNK_BYTES = 2 << 20
"""Chunks are what a device reads. Larger ones are divided, so that a device reads little that it does not need."""
SLAB_BYTES = 32 << 20
"""Read, transformed and written at once."""
UNIT_BYTES = 256 << 20
"""Done completely or again, after an interruption."""
