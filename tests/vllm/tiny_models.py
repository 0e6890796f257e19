"""Random models of a few layers, as directories that vLLM can load; made with transformers."""

from pathlib import Path

VOCABULARY = 512


def write_gemma3(path: Path, *, seed: int = 0) -> None:
    """Write a model with layers in the order window, window, full: a window of 64 tokens."""
    import torch  # noqa: PLC0415 - this file is also collected where neither is installed
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # noqa: PLC0415

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.2,
        architectures=["Gemma3ForCausalLM"],
    )
    torch.manual_seed(seed)
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(path)
