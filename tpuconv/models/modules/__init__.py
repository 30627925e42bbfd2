"""Modules that the families of a lineage have of their own, by lineage."""
