"""The tower of Ovis 2 (arXiv:2405.20797), whose features are mixtures of the rows of a table."""
