"""MiniMax-Text-01."""
