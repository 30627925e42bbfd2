"""Seed-OSS."""
