"""The tower of Molmo 2 and its pooling."""
