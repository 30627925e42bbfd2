"""The encoder of wav2vec 2.0."""
