"""The catalogue of errors: each is there, and is raised by its example."""

import doctest
import re
from pathlib import Path

import pytest

import hvp
from hvp import _errors
from tests.cases import FUZZ

CATALOGUE = Path(__file__).parents[1] / "docs" / "errors.rst"


def sections():
    """Return the text under each heading."""
    parts = re.split(r"^(\w+)\n-{3,}\n", CATALOGUE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


class ExamplesThatEndSoon(doctest.DocTestParser):
    """Leaves out the example of too little memory, for which TensorFlow tries ten seconds.

    `test_processes` runs the same loss in a process where TensorFlow gives up at once.
    """

    def get_examples(self, string, name="<string>"):
        examples = super().get_examples(string, name)
        return [e for e in examples if "[2**44]" not in e.source]


def test_the_catalogue_runs():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    parser = doctest.DocTestParser() if FUZZ else ExamplesThatEndSoon()
    failed, run = doctest.testfile(
        str(CATALOGUE), module_relative=False, optionflags=flags, parser=parser
    )
    assert run > len(_errors.__all__)
    assert failed == 0


@pytest.mark.parametrize("name", _errors.__all__)
def test_every_error_is_in_it_and_public(name):
    examples = doctest.DocTestParser().get_examples(sections()[name])
    raised = [example.exc_msg for example in examples if example.exc_msg]
    assert len(raised) == 1
    assert raised[0].startswith(f"hvp.{name}: ")
    kind = getattr(hvp, name)
    assert kind.__module__ == "hvp"
    assert name in hvp.__all__
    assert issubclass(kind, (hvp.HvpError, Warning))


def test_the_catalogue_names_nothing_else():
    assert set(sections()) == set(_errors.__all__)
