"""The families: config, table and Flax NNX modules of each, and the leaves they share."""
