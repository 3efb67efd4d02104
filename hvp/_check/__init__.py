"""Checks that an operator is the Hessian that was meant."""
