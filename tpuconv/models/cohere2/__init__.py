"""Cohere 2: Command R7B and Command A."""
