"""Layer 3: which training examples are responsible for a prediction."""
