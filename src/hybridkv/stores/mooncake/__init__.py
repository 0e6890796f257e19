"""Mooncake Store as a store of hybridkv; only these modules import mooncake."""
