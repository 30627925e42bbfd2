"""OLMo Hybrid."""
