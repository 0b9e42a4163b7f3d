"""The run itself: state, step, loop, metrics, evaluation, generation."""
