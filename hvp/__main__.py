"""`python -m hvp model.keras data.npz`: the curvature of a saved Keras model."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> int:
    """Run the command; return its exit status."""
    from hvp._command.command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
