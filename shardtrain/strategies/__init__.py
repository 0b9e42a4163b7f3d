"""Wrappers around a function or a model: accumulation, remat, precision. One a file."""
