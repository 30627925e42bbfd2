"""MiMo-V2-Flash."""
