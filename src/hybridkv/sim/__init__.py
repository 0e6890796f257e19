"""Replays of request traces: reading, naming and generating them."""
