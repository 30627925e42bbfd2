"""DeepSeek V3, R1, V3.1."""
