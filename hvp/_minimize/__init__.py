"""Minimization of a loss with its Hessian."""
