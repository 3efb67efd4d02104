"""The command `hvp`: the curvature of a saved Keras model, as text, JSON and a figure."""
