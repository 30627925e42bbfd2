"""MiniMax-M3, the text model saved on its own."""
