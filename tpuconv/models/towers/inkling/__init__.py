"""The encoders of Inkling and Inkling 2."""
