"""DSpark drafts."""
