"""The common parts of families: layers, caches, experts, the decoder."""
