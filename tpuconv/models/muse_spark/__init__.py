"""Muse Spark, of which the text model is converted."""
