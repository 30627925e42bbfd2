"""Alice AI Foundation."""
