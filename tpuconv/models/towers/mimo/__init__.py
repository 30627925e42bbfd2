"""The towers of MiMo V2.5 and V2.6."""
