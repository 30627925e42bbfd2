"""The towers of Qwen-VL and GLM-V, which take images of any size as one sequence of patches."""
