"""Code World Model."""
