"""What became of random programs, counted over all processes of a run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any


class Report:
    """Counts of programs by what became of them, and the operations they were made of."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.operations: set[str] = set()
        self.fallbacks = 0
        self.mismatches: list[str] = []

    def add(self, outcome: str, made: Any) -> None:
        """Count a program."""
        self.outcomes[outcome] += 1
        if outcome == "agree":
            self.operations |= made.operations()

    @contextlib.contextmanager
    def mismatch(self, program: Any) -> Iterator[None]:
        """Note the program, if what is done with it raises."""
        try:
            yield
        except Exception as error:
            self.outcomes["wrong"] += 1
            first = (str(error).strip().splitlines() or [""])[0]
            self.mismatches.append(f"{program!r}: {type(error).__name__}: {first}")
            raise

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts of another process."""
        self.outcomes.update(other["outcomes"])
        self.fallbacks += other["fallbacks"]
        self.operations |= set(other["operations"])
        self.mismatches += other["mismatches"]

    def as_dict(self) -> dict[str, Any]:
        """What `merge` takes."""
        return {
            "outcomes": dict(self.outcomes),
            "fallbacks": self.fallbacks,
            "operations": sorted(self.operations),
            "mismatches": self.mismatches,
        }

    def lines(self) -> list[str]:
        """Return a summary."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        return [
            f"{sum(self.outcomes.values())} programs: {counts}",
            f"{len(self.operations)} kinds of TensorFlow operations in those that agree",
            f"{self.fallbacks} operators fell to the tape engine",
            *sorted(set(self.mismatches)),
        ]


REPORT = Report()
