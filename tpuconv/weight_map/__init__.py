"""Maps between two trees of the weights of a model, on arrays in memory."""
