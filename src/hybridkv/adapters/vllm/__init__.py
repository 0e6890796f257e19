"""vLLM: ``HybridKVConnector`` in ``hybridkv.adapters.vllm.connector``, the ``kv_connector_module_path``."""
