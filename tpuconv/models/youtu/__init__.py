"""Youtu-LLM."""
