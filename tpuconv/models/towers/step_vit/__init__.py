"""The vision encoder of Step-3.7."""
