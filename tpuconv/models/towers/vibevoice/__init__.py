"""The encoders of VibeVoice-ASR."""
