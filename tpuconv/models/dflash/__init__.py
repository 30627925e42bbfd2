"""DFlash drafts."""
