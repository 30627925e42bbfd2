"""XGLM."""
