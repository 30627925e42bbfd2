"""Safetensors, from a checkpoint or straight from a source."""
