"""What families share: layers, caches, experts, the decoder."""
