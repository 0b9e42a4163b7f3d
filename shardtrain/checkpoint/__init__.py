"""Complete or absent: saving and restoring a state under any placement."""
