"""Layer 3: which training examples made a prediction."""
