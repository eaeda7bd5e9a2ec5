"""Writes models.json: logits of tiny models by mlx-lm, an implementation that shares no code with this project.

    pip install mlx-lm && python make.py          # made with mlx-lm 0.32.2, MLX 0.32.4, on the CPU

The weights are a hash of tensor name and index (`number` here and in ../support), so that the file holds only
configurations and, for a few positions, logits in float32.
"""

import importlib
import json
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases-llama3": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 32,
        "rope_scaling": LLAMA3,
    },
    "llama-linear": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "qwen3-tied": {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_theta": 1000000.0,
    },
    "qwen3-affine": {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "head_dim": 16,
        "quantization": {"group_size": 32, "bits": 4},
    },
}
TOKENS = [(i * 37 + 11) % 96 for i in range(24)]
POSITIONS = [0, 11, 23]


def number(name: str, count: int) -> np.ndarray:
    """Hashes in [-0.5, 0.5): FNV-1a of the name, a multiplicative step for the index, two xor-shift rounds."""
    h = 0x811C9DC5
    for byte in name.encode():
        h = (h ^ byte) * 0x01000193 % 2**32
    x = (h + np.arange(count, dtype=np.uint64) * 2654435761) % 2**32
    x ^= x >> 15
    x = x * 2246822519 % 2**32
    x ^= x >> 13
    return x.astype(np.float64) / 2**32 - 0.5


def weight(name: str, shape) -> mx.array:
    u = number(name, math.prod(shape)).reshape(shape)
    if name.endswith("norm.weight"):
        u = 1 + u
    elif "embed_tokens" in name:
        u = 2 * u
    elif name.endswith(".weight"):
        u = 6 / math.sqrt(shape[-1]) * u
    return mx.array(u.astype(np.float32))


def main():
    mx.set_default_device(mx.cpu)
    cases = {}
    for name, changes in CASES.items():
        config = {**BASE, **changes}
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        # What mlx-lm wants and Hugging Face's files may leave out.
        full = {"head_dim": config["hidden_size"] // config["num_attention_heads"], **config}
        model = module.Model(module.ModelArgs.from_dict(full))
        shapes = dict(nn.utils.tree_flatten(model.parameters()))
        model.load_weights([(k, weight(k, v.shape)) for k, v in shapes.items()])
        if "quantization" in config:
            nn.quantize(model, **config["quantization"])
        logits = np.array(model(mx.array([TOKENS]))[0])
        cases[name] = {"config": config, "logits": [[float(f"{v:.7g}") for v in logits[p]] for p in POSITIONS]}
    out = {"tokens": TOKENS, "positions": POSITIONS, "cases": cases}
    Path(__file__).with_name("models.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
