"""VaultGemma."""
