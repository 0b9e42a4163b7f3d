"""Token files, their preparation, and batches as a pure function of the cursor."""
