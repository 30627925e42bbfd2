"""The audio encoders of Qwen-Omni and Qwen3-ASR."""
