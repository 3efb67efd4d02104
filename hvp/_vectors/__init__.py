"""Parameters as vectors."""
