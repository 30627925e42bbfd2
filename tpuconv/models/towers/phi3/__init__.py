"""The tower of Phi-3-vision."""
