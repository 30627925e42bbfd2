"""Towers of other models that take images of any size as one sequence of patches, as Qwen-VL's do."""
