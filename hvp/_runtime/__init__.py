"""The process: interrupts, forks, locks, progress bars, checkpoints."""
