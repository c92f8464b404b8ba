"""The ops that have a handwritten kernel, as `torch.ops.minillm.<op>`: one name, wherever the tensor lives.

Declared here, computed in three places: reference.py (plain torch, same names and arguments, with the shapes in its
docstrings), the .cu files built by nvcc (CUDA tensors), and the same .cu files in the simulator (CPU tensors).
`build.load_kernels()` brings the last two. `version` chooses a rung of a kernel's ladder; the default is the fastest.
(a!) marks a tensor that is written.
"""

import torch

SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps, int version=3) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps, int version=3) -> (Tensor, Tensor)",
    "rope_and_store": "(Tensor qkv, Tensor positions, Tensor cos_sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, int num_heads, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> Tensor",
    "silu_and_mul": "(Tensor x) -> Tensor",
    "gemv": "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    "argmax": "(Tensor logits) -> Tensor",
    "sample": "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor",
    "decode_attention": "(Tensor q, Tensor k, Tensor v) -> Tensor",
    "paged_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "int version=3, int num_splits=0, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    "paged_prefill_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor query_starts, int max_query_len, int version=2, Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor",
    "quantize": "(Tensor x) -> (Tensor, Tensor)",
    "linear_w8a16": "(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None) -> Tensor",
    "linear_w8a8": "(Tensor x, Tensor codes, Tensor scale, Tensor? bias=None, int version=2) -> Tensor",
}

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"minillm::{_name}", _schema)
