"""hybridkv: KV cache outside the serving engine, for models whose layers do not all look at the whole prompt."""

__version__ = "0.1.0"
