"""What is known of Keras beyond its public interface."""
