"""Layer 3: minimization of a loss with its Hessian."""
