"""The tower of dots.ocr."""
