"""MiMo."""
