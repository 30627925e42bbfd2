"""The Perception Encoder of Perception LM."""
