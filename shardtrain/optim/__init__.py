"""Optimizers and schedules by name, the choice of what decays, and the update."""
