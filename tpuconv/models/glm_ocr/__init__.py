"""GLM-OCR, the text model."""
