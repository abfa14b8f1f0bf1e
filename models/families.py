"""The config.json of what is trained here: two families, each as shipped and as small as a test wants it.

What vLLM's kernels on an H200 ask for: 512 latent and 64 rotary dims (FlashMLA's row), 128 indexer dims, 64 or 32
indexer heads (DeepGEMM), index_topk of at least 512 (its top-k kernels know 512, 1024 and 2048). FlashMLA pads
attention heads to 64. The rest is free: hidden size, depth, nope and value dims, dense layers instead of experts.

rms_norm_eps is 1e-6 in both families, though GLM-5 has 1e-5: transformers 5.19 takes 1e-6 for the two norms inside
attention whatever the config says, vLLM takes the config's, and this is where both agree.
"""

from __future__ import annotations

from typing import Any

from dsafuse.accuracy.tokenizer import BOS, EOS, IDS, PAD, VOCABULARY

LONGEST = 4096

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": -(-len(VOCABULARY) // 64) * 64,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 512,
    "index_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": IDS[BOS],
    "eos_token_id": IDS[EOS],
    "pad_token_id": IDS[PAD],
    # Both engines want to know of experts; no layer has them, the MTP layer behind the last included.
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "dsa-v32-small": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **_COMMON,
        "intermediate_size": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 64,
    },
    "dsa-glm-small": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **_COMMON,
        "intermediate_size": 384,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        # The third layer attends to what the second one chose. The first cannot choose for others: it sees no
        # more of a token than its embedding, and which key a digit belongs to is not in there.
        "index_topk_pattern": "FFS",
        "num_nextn_predict_layers": 1,
    },
}

# A few seconds on a CPU. The head sizes stay; the widths around them shrink, and so does what is chosen.
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 32,
}


def tiny(family: str) -> dict[str, Any]:
    """A family's config at the size of a test."""
    return {**CONFIGS[family], **TINY}
