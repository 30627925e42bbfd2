"""The tower of MiniCPM-V 4.6: SigLIP with a layer inside that joins patches."""
