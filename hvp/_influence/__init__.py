"""Which training examples are responsible for a prediction."""
