"""DeepSeek V4."""
