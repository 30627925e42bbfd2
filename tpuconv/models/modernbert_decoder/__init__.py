"""The decoder of ModernBERT."""
