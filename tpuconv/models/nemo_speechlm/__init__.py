"""Nemotron 3.5 Transcribe, of which the text model is converted."""
