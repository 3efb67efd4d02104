"""Layer 3: solving with an operator."""
