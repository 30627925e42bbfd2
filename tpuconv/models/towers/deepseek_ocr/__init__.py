"""The encoder of DeepSeek-OCR 2: SAM, and learned queries behind its patches in the layers of a decoder."""
