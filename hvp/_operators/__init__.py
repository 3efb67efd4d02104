"""Layer 2: linear maps of layer 1 as operators, with a life cycle, for scipy and TensorFlow."""
