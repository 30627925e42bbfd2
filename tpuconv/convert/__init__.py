"""From safetensors to Orbax and back: the plan of a conversion, its run, and export. Imports no family."""
