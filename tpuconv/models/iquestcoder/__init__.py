"""IQuest-Coder."""
