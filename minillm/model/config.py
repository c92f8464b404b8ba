"""The numbers that define a model, read from a Hugging Face `config.json` or from GGUF metadata.

Every model of the Llama family is the same code with other numbers. What this package does not compute is
refused here, by the name of the field, before a weight is read: a model that loads and is silently wrong is
the worst fault an engine can have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Hugging Face's `model_type` / GGUF's `general.architecture` -> (QKV bias, QK norm)
ARCHITECTURES = {
    "llama": (False, False),  # Llama 2 and 3, SmolLM2, TinyLlama
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}


class UnsupportedModelError(ValueError):
    """The model asks for something that this package does not compute; the message names the field."""


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # fewer than num_heads is grouped-query attention (Ainslie et al. 2023)
    head_dim: int  # not always hidden_size / num_heads: Qwen3 sets it by itself
    intermediate_size: int  # width of the SwiGLU feed-forward
    max_position_embeddings: int  # the context limit, in tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_factors: tuple[float, ...] | None = None  # head_dim/2 divisors of the RoPE frequencies (Llama 3.1 on)
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k, before RoPE
    tie_word_embeddings: bool = False  # the head is the embedding matrix: 28 M of SmolLM2-135M's parameters
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a completion

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModelError(f"{name}={value!r}: must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim={self.head_dim}: must be even, RoPE rotates pairs")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise UnsupportedModelError(
                f"rope_factors: {len(self.rope_factors)} of them, must be head_dim/2 = {self.head_dim // 2}"
            )

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head counts once.

        >>> tiny = ModelConfig(vocab_size=259, hidden_size=96, num_layers=2, num_heads=6, num_kv_heads=2,
        ...                    head_dim=16, intermediate_size=128, max_position_embeddings=256)
        >>> tiny.num_parameters
        173088
        """
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        attention += (q + 2 * kv) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        layers = self.num_layers * (attention + feed_forward + 2 * self.hidden_size)
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + layers + self.hidden_size

    @classmethod
    def from_huggingface(cls, config: dict, generation_config: dict | None = None) -> ModelConfig:
        """Read a `config.json` and, where there is one, a `generation_config.json`, as dicts.

        Raises UnsupportedModelError naming the field that is missing or not supported.
        """
        _refuse_unsupported(config)
        qkv_bias, qk_norm = ARCHITECTURES[config["model_type"]]
        heads = _required(config, "num_attention_heads")
        head_dim = config.get("head_dim") or _required(config, "hidden_size") // heads
        theta, factors = _read_rope(config, head_dim)
        return cls(
            vocab_size=_required(config, "vocab_size"),
            hidden_size=_required(config, "hidden_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate_size=_required(config, "intermediate_size"),
            max_position_embeddings=_required(config, "max_position_embeddings"),
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            rope_theta=theta,
            rope_factors=factors,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            # The two files may name different ids; each of them ends a completion.
            eos_token_ids=_union(config.get("eos_token_id"), (generation_config or {}).get("eos_token_id")),
        )

    @classmethod
    def from_gguf(cls, metadata: dict, tensors: dict[str, tuple[int, ...]]) -> ModelConfig:
        """Read GGUF metadata. `tensors` maps the names of the file's tensors to their shapes: a tied head is
        one that is absent, and older files name no vocabulary size.

        The RoPE factors of Llama 3.1 on are a tensor (`rope_freqs.weight`): `weights.py` fills them in.
        """
        arch = metadata.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise UnsupportedModelError(f"general.architecture={arch!r}: must be one of {', '.join(ARCHITECTURES)}")

        def field(key: str, default=None):
            value = metadata.get(f"{arch}.{key}", default)
            if value is None:
                raise UnsupportedModelError(f"GGUF metadata has no {arch}.{key}")
            return value

        if field("expert_count", 0):
            raise UnsupportedModelError(
                f"{arch}.expert_count={field('expert_count')}: mixture of experts is not supported"
            )
        window = field("attention.sliding_window", 0)
        if window and window < field("context_length"):
            raise UnsupportedModelError(
                f"{arch}.attention.sliding_window={window}: sliding-window attention is not supported"
            )
        if field("rope.scaling.type", "none") != "none":
            raise UnsupportedModelError(f"{arch}.rope.scaling.type={field('rope.scaling.type')!r}: must be none")
        heads = field("attention.head_count")
        head_dim = field("attention.key_length", field("embedding_length") // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if field(key, head_dim) != head_dim:
                raise UnsupportedModelError(f"{arch}.{key}={field(key)}: must be the head_dim, {head_dim}")
        qkv_bias, qk_norm = ARCHITECTURES[arch]
        return cls(
            vocab_size=tensors["token_embd.weight"][0] if "token_embd.weight" in tensors else field("vocab_size"),
            hidden_size=field("embedding_length"),
            num_layers=field("block_count"),
            num_heads=heads,
            num_kv_heads=field("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=field("feed_forward_length"),
            max_position_embeddings=field("context_length"),
            rms_norm_eps=float(field("attention.layer_norm_rms_epsilon")),
            rope_theta=float(field("rope.freq_base", 10_000.0)),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            tie_word_embeddings="output.weight" not in tensors,
            eos_token_ids=_union(*(metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))),
        )


def llama3_rope_factors(head_dim: int, theta: float, scaling: dict) -> tuple[float, ...]:
    """What Llama 3.1 divides each RoPE frequency by, for a longer context than it was trained on.

    Wavelengths shorter than original / high_freq_factor stay (divisor 1), those longer than
    original / low_freq_factor are stretched by `factor`, those between are blended.
    Returns head_dim/2 divisors. Source: Llama 3.1's reference code, `apply_scaling`.

    >>> s = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    >>> f = llama3_rope_factors(64, 500_000.0, s)
    >>> f[14], 1 < f[15] < 32, f[18]
    (1.0, True, 32.0)
    """
    factor, low, high = (float(_required(scaling, k)) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _required(scaling, "original_max_position_embeddings")
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)  # tokens per full turn of this pair
        # 0 where the wavelength is long (divide by factor), 1 where it is short (leave alone)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def _read_rope(config: dict, head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    # transformers 5 writes one `rope_parameters`, earlier releases `rope_theta` beside `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor: must be 1, the whole head is rotated")
    kind = rope.get("rope_type", rope.get("type", "default"))  # both spellings are out there
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, llama3_rope_factors(head_dim, theta, rope)
    raise UnsupportedModelError(f"rope_scaling type {kind!r}: must be 'default' or 'llama3'")


def _refuse_unsupported(config: dict) -> None:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(f"model_type={model_type!r}: must be one of {', '.join(ARCHITECTURES)}")
    must_be = {
        "hidden_act": ("silu", "swish"),
        "mlp_bias": (False,),
        "quantization_config": (None,),
        "num_local_experts": (None, 0),
        "num_experts": (None, 0),
        # Qwen2 always has the bias on q, k and v that this field means there
        "attention_bias": (True, False) if model_type == "qwen2" else (False,),
    }
    for field, allowed in must_be.items():
        if config.get(field, allowed[0]) not in allowed:
            raise UnsupportedModelError(f"{field}={config[field]!r} is not supported: must be {allowed[0]!r}")
    window = config.get("sliding_window")
    in_use = config.get("use_sliding_window", model_type == "mistral")
    if window and in_use and window < _required(config, "max_position_embeddings"):
        raise UnsupportedModelError(f"sliding_window={window}: sliding-window attention is not supported")
    other_layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise UnsupportedModelError(f"layer_types has {other_layers.pop()!r}: must be 'full_attention' throughout")


def _required(mapping: dict, field: str):
    if mapping.get(field) is None:
        raise UnsupportedModelError(f"config has no {field}")
    return mapping[field]


def _union(*ids) -> tuple[int, ...]:
    """Token ids given as None, an int or a list, together and in order."""
    flat = [i for group in ids for i in (group if isinstance(group, list | tuple) else [group]) if i is not None]
    return tuple(dict.fromkeys(flat))
