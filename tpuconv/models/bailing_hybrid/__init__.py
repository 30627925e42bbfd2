"""Ling 3 and Bailing, hybrid."""
