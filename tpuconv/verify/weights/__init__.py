"""The values of weights: statistics in one pass, differences of two checkpoints, and the page that shows them."""
