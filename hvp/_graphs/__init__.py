"""Graph surgery, without derivatives."""
