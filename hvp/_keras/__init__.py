"""Access to Keras models and layers, beyond the public interface of Keras."""
