"""Solar Open."""
