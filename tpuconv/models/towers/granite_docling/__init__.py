"""The tower of Granite for Docling: SigLIP, whose features are joined coarsely or finely."""
