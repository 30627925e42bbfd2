"""Inkling 2 with looped layers."""
