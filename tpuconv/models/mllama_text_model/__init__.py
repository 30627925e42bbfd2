"""The text model of Llama 3.2 Vision, some of whose layers attend to images."""
