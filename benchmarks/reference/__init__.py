"""The same run in plain PyTorch, to compare losses with; one file a model, `ddp.py` for all."""
