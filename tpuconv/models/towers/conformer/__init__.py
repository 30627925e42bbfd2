"""The conformer of Granite Speech (arXiv:2005.08100), and the Q-Former that reads it (arXiv:2301.12597)."""
