"""Traced graphs: how values depend on each other, and how to cut and rewrite them."""
