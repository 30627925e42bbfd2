"""GPT-NeoX and Pythia."""
