"""Cohere: Command R and R+."""
