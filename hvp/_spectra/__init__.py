"""Eigenvalues, traces, diagonals and spectral densities, by products with vectors."""
