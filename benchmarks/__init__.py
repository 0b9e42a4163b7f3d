"""Steps of other trainers on the same model and data, to compare with (docs/benchmarks.md)."""
