"""Data in batches, and the memory that they may take."""
