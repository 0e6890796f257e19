"""hybridkv: KV cache outside the serving engine, for models that mix kinds of attention."""

__version__ = "0.1.0"
