"""BLOOM and BLOOMZ."""
