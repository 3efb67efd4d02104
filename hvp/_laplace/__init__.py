"""Laplace approximations: how sure a model is of its weights and predictions."""
