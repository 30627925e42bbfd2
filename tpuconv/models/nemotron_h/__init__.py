"""Nemotron-H, Nemotron Nano 2 and Nemotron 3."""
