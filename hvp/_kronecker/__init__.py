"""Kronecker-factored approximations of curvature, with inverses in closed form."""
