"""Derivatives in the inputs of a function, by Taylor coefficients pushed through its graph."""
