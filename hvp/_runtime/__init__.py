"""Interrupts, forks, locks, progress bars and checkpoints."""
