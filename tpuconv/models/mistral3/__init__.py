"""Mistral Small 3.1 and later, Ministral 3: with their vision tower, of which the text model is converted."""
