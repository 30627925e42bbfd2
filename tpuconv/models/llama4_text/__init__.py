"""The text model of Llama 4, saved separately."""
