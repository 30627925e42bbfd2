"""Targets: the trees of parameters that other programs load, as tables from our names to theirs."""
