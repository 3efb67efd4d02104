"""Layer 3: Kronecker-factored approximations of curvature, with inverses in closed form."""
