"""Nemotron."""
