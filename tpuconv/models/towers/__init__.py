"""Vision and audio towers, and what they share."""
