"""Layer 3: checks that an operator is the Hessian that was meant."""
