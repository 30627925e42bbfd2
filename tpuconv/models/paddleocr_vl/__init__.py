"""PaddleOCR-VL, the text model."""
