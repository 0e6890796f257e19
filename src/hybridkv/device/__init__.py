"""Block memory on torch tensors; beside the adapters the only place that imports torch."""
