"""The tower of ERNIE 4.5 VL."""
