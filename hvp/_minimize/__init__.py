"""Layer 3: minimizing a loss with its Hessian."""
