"""CodeGen."""
