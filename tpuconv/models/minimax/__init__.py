"""MiniMax-Text-01 and MiniMax-M1."""
