"""Layer 1: linearize a function of variables. Knows TensorFlow, nothing of scipy or data sets."""
