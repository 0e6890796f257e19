"""Adapters: one folder an engine, which translates at the border and calls the service."""
