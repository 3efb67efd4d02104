"""Linear systems with an operator, preconditioners and inverses."""
