"""The engine-independent services that an adapter calls."""
