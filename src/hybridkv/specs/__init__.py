"""Kinds of attention, cache groups and layouts: what a model's layers need from a prefix."""
