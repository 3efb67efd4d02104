"""Batches of data, and the memory limit for evaluating them."""
