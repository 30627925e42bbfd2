"""K-EXAONE."""
