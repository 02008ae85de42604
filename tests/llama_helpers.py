"""What tests of the llama family share: transformers' three classes at tiny sizes, and ours from what they saved."""

import copy

import torch
from helpers import F64, enlarge

from longstraw import build_model, load_model

# The tiny model's sizes, as both sides name them.
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}
CLASSES = {  # of transformers, with what is set beyond the sizes; between them every field takes each value
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": PLAIN}),
}


def hf_model(name):
    """Return transformers' float32 model of ``CLASSES`` with large weights and biases and norms off their centre."""
    import transformers

    kind, options = CLASSES[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | copy.deepcopy(options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    enlarge(model.named_parameters())
    return model


def both(name, folder, **keys):
    """Return transformers' model and ours, read from what it saved to ``folder``."""
    theirs = hf_model(name)
    theirs.save_pretrained(folder)
    return theirs, load_model(folder, dtype="float32", **keys)


def llama_model(seed=0, dtype=F64, **overrides):
    """Return the tiny model with large weights; three layers and tied embeddings by default."""
    overrides = {"num_hidden_layers": 3, "intermediate_size": 96} | overrides
    model = build_model("llama_tiny", seed=seed, dtype=dtype, **overrides)
    with torch.no_grad():
        enlarge(model.named_parameters(), seed)
    return model
