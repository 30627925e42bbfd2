"""LongCat-Flash with embeddings of n-grams."""
