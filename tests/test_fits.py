"""The page on fits: its code runs, and agrees with scipy and with closed forms."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit

PAGE = Path(__file__).parents[1] / "docs" / "fits.rst"


@pytest.fixture(scope="module")
def page():
    found = re.findall(r".. code-block:: python\n\n((?:   .*\n|\n)*)", PAGE.read_text())
    names = {}
    exec("\n".join(map(textwrap.dedent, found)), names)
    return names


def test_standard_errors_are_those_of_curve_fit(page):
    def rate(concentration, largest, half):
        return largest * concentration / (concentration + half)

    arguments = rate, page["concentration"], page["rate"], page["units"]
    sigma = np.full(len(page["rate"]), page["sigma"])
    best, covariance = curve_fit(*arguments, sigma=sigma, absolute_sigma=True, xtol=1e-13)
    np.testing.assert_allclose(page["p"].numpy() * page["units"], best, rtol=1e-6)
    np.testing.assert_allclose(page["like_curve_fit"], np.sqrt(np.diag(covariance)), rtol=1e-5)
    covariance = curve_fit(*arguments, xtol=1e-13)[1]
    np.testing.assert_allclose(page["with_estimate"], np.sqrt(np.diag(covariance)), rtol=1e-5)
    np.testing.assert_allclose(
        page["standard_errors"], np.sqrt(np.diag(page["covariance"])), rtol=1e-10
    )


def test_the_band_is_that_of_the_derivatives(page):
    largest, half = page["p"].numpy() * page["units"]
    c = page["concentration"]
    J = np.stack([c / (c + half), -largest * c / (c + half) ** 2], axis=1)
    band = np.sqrt(np.einsum("ij,jk,ik->i", J, page["covariance"], J))
    np.testing.assert_allclose(page["band"], band, rtol=1e-8)


def test_counts_have_the_expected_information_in_closed_form(page):
    background, height, position, width = page["q"].numpy()
    apart = page["channel"] - position
    peak = np.exp(height - apart**2 / (2 * np.exp(2 * width)))
    slopes = [
        np.full(len(apart), np.exp(background)),
        peak,
        peak * apart / np.exp(2 * width),
        peak * apart**2 / np.exp(2 * width),
    ]
    J, mean = np.stack(slopes, axis=1), np.exp(background) + peak
    information = J.T @ (J / mean[:, np.newaxis])
    expected = np.sqrt(np.diag(np.linalg.inv(information)))
    np.testing.assert_allclose(page["expected"], expected, rtol=1e-8)
    np.testing.assert_allclose(page["of_counts"], expected, rtol=0.05)
    gradient = J.T @ (1 - page["counts"] / mean)
    assert np.abs(gradient).max() < 1e-4
