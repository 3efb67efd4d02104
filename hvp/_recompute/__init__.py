"""Functions whose derivatives recompute intermediate values instead of keeping them."""
