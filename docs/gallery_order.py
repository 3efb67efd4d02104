"""The order of the examples in the gallery: from the first product to several machines."""

ORDER = """
cg_solve persistent_tapes all_digits memory_limit gauss_newton standard_errors spectrum sharpness
newton_logistic newton_autoencoder newton_pinn poisson_pinn schroedinger influence_digits
influence_loo ekfac_influence influence_text laplace calibration weights_that_matter
hyperparameters implicit_maml equilibrium_layer two_workers
""".split()


def place_of(filename: str) -> int:
    """Return the place of an example; one that is not listed is an error."""
    return ORDER.index(filename.removesuffix(".py"))
