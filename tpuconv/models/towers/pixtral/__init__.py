"""The tower of Pixtral (arXiv:2410.07073), which takes images of any size as one sequence of patches."""
