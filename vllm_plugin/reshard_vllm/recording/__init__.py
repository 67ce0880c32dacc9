"""Discovering a layout by running the model's own loader once, on a skeleton, without data."""
