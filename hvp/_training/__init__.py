"""Optimizers for `model.fit` that use curvature."""
