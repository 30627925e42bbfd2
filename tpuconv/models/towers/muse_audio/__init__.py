"""The audio encoder of Muse Spark."""
