"""MiniCPM 3."""
