"""The text model of North Micro Vision."""
