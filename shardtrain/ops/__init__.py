"""Pure functions that are fast: dense, attention, embedding, cross-entropy."""
