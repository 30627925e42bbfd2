"""HRM-Text."""
