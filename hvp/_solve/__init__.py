"""Layer 3: linear systems with an operator, preconditioners and inverses."""
