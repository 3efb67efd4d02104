"""Every public use on every family of models, against dense matrices in float64."""

import functools

import pytest

import hvp
from tests.uses.families import FAMILIES
from tests.uses.uses import USES, Subject

subject = functools.lru_cache(maxsize=2)(Subject)
