"""Layer 1: functions whose intermediate values are computed again instead of kept."""
