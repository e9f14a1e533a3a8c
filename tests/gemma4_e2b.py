"""The configuration of Gemma 4 E2B, as its published folder has it: full-size geometry without weights."""

from __future__ import annotations

from typing import Any

KINDS = ["full_attention" if (i + 1) % 5 == 0 else "sliding_attention" for i in range(35)]
E2B: dict[str, Any] = {
    "model_type": "gemma4",
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "text_config": {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": KINDS,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"hidden_size": 768},
}
