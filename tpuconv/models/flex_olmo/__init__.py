"""FlexOlmo."""
