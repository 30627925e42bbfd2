"""ERNIE 4.5, mixture of experts."""
