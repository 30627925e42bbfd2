"""Cohere 2, mixture of experts: Command A+."""
