"""Weights and configs of other trainers, both ways."""
