"""The image encoder of Segment Anything (SAM, arXiv:2304.02643) and what GOT-OCR 2.0 and DeepSeek-VL make of it."""
