"""The encoders of Phi-4-multimodal."""
