"""Random models of a few layers, as directories that vLLM can load; made with transformers.

::

    kind         layers                        cache groups of vLLM
    llama        full x3                       full
    gemma3       (window, window, full) x2     window, window, full
    gpt_oss      (window, full) x2             window, full
    cohere2      (window x3, full) x1          window, window, window, full
    qwen3_next   (gated delta x3, full) x1     recurrent, recurrent, recurrent, full
    deepseek_v2  latent x2                     latent
"""

from pathlib import Path

VOCABULARY = 512
WINDOW = 64

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,  # tied random weights repeat one token
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_ATTENTION = {"head_dim": 32}
_EXPERTS = {"num_experts_per_tok": 2}

_WINDOW, _FULL = "sliding_attention", "full_attention"
_MODELS = {
    "llama": ("Llama", "LlamaConfig", {**_ATTENTION, "num_hidden_layers": 3}),
    "gemma3": (
        "Gemma3",
        "Gemma3TextConfig",
        {
            **_ATTENTION,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
            "layer_types": [_WINDOW, _WINDOW, _FULL] * 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        "GptOssConfig",
        {
            **_ATTENTION,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": [_WINDOW, _FULL] * 2,
            "num_local_experts": 4,
        },
    ),
    "cohere2": (
        "Cohere2",
        "Cohere2Config",
        {
            "hidden_size": 128,  # heads of 32: vLLM's kernel for the CPU has none of 16
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": [_WINDOW] * 3 + [_FULL],
            "tie_word_embeddings": True,  # the architecture knows nothing else
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,  # vLLM makes blocks of 64 tokens then, as large as one state
            "head_dim": 128,
            "layer_types": ["linear_attention"] * 3 + [_FULL],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        "DeepseekV2Config",
        {
            **_EXPERTS,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,  # with the rope's 64 the only width of vLLM's kernel for the CPU
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}


def write_model(kind: str, path: Path, *, seed: int = 0, dtype: str = "float32", **changes: object) -> None:
    """Write a model of a kind with random weights.

    Args:
        kind: see the table above.
        path: of the directory; made where it does not exist.
        seed: of the weights.
        dtype: of the weights.
        changes: to the configuration.
    """
    import torch  # noqa: PLC0415 - this file is also collected where neither is installed
    import transformers  # noqa: PLC0415

    family, config_name, settings = _MODELS[kind]
    config = getattr(transformers, config_name)(
        **{**_COMMON, **settings, "architectures": [f"{family}ForCausalLM"], **changes}
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(path)


def write_gemma3(path: Path, *, seed: int = 0) -> None:
    """Write a model with layers in the order window, window, full: a window of 64 tokens."""
    write_model("gemma3", path, seed=seed)
