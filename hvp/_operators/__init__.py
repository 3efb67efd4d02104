"""Linear maps as operators for scipy and TensorFlow, with a life cycle."""
