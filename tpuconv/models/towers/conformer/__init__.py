"""The conformer of Granite Speech (arXiv:2005.08100)."""
