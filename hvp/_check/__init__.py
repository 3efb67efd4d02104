"""Layer 3: looking whether an operator is right."""
