"""BitNet b1.58."""
