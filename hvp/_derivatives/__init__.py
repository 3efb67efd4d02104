"""TensorFlow's derivatives: corrected where they are wrong, refused where they are missing."""
