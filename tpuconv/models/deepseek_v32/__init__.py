"""DeepSeek V3.2."""
