"""The vision encoder of FastVLM."""
