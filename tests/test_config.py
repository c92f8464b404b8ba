"""What ModelConfig reads, and what it refuses by name."""

import pytest
import torch
import transformers

from minillm.model.config import ModelConfig, UnsupportedModelError

LLAMA = dict(
    model_type="llama", vocab_size=259, hidden_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, intermediate_size=128, max_position_embeddings=256, rms_norm_eps=1e-5,
)  # fmt: skip
QWEN2, MISTRAL = dict(LLAMA, model_type="qwen2"), dict(LLAMA, model_type="mistral")


@pytest.mark.parametrize(
    "config, field",
    [
        (dict(LLAMA, model_type="mixtral"), "model_type='mixtral'"),
        (dict(LLAMA, model_type="gpt2"), "model_type='gpt2'"),
        ({k: v for k, v in LLAMA.items() if k != "model_type"}, "model_type=None"),
        (dict(LLAMA, hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(LLAMA, mlp_bias=True), "mlp_bias=True"),
        (dict(LLAMA, attention_bias=True), "attention_bias=True"),
        (dict(LLAMA, quantization_config={"bits": 4}), "quantization_config"),
        (dict(LLAMA, num_local_experts=8), "num_local_experts=8"),
        (dict(MISTRAL, sliding_window=64), "sliding_window=64"),
        (dict(QWEN2, sliding_window=64, use_sliding_window=True), "sliding_window=64"),
        (dict(LLAMA, layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (dict(LLAMA, partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(LLAMA, num_key_value_heads=4), "num_kv_heads=4"),
        (dict(LLAMA, head_dim=15), "head_dim=15"),
        (dict(LLAMA, vocab_size=0), "vocab_size=0"),
        (dict(LLAMA, num_experts=8), "num_experts=8"),
        (dict(LLAMA, rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling type 'linear'"),
        (dict(LLAMA, rope_scaling={"type": "llama3", "factor": 2.0}), "low_freq_factor"),
    ],
)
def test_refused_by_name(config, field):
    with pytest.raises(UnsupportedModelError) as error:
        ModelConfig.from_huggingface(config)
    assert field in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("field", sorted(LLAMA.keys() - {"model_type", "num_key_value_heads"}))
def test_a_missing_field_is_named(field):
    with pytest.raises(UnsupportedModelError, match=f"no {field}$"):
        ModelConfig.from_huggingface({k: v for k, v in LLAMA.items() if k != field})


@pytest.mark.parametrize(
    "config",
    [
        dict(QWEN2, sliding_window=64, use_sliding_window=False),  # as Qwen2.5 is shipped
        dict(MISTRAL, sliding_window=None),
        dict(MISTRAL, sliding_window=256),  # as long as the context: never in use
    ],
)
def test_a_sliding_window_out_of_use_is_accepted(config):
    assert ModelConfig.from_huggingface(config).hidden_size == 96


@pytest.mark.parametrize(
    "eos, more, expected", [(6, [5], (6, 5)), ([6, 7], 7, (6, 7)), (None, 5, (5,)), (None, None, ())]
)
def test_C21_end_tokens_of_both_files(eos, more, expected):
    config = ModelConfig.from_huggingface(dict(LLAMA, eos_token_id=eos), {"eos_token_id": more})
    assert config.eos_token_ids == expected


def shipped(model_type, vocab, hidden, layers, heads, kv_heads, intermediate, context, **more):
    return dict(
        model_type=model_type, vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate,
        max_position_embeddings=context, rms_norm_eps=1e-5, hidden_act="silu", **more,
    )  # fmt: skip


LLAMA3_SCALING = dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
SHIPPED = {  # as on the hub, with the number of parameters that each model is known for
    "Llama-2-7B": (shipped("llama", 32000, 4096, 32, 32, 32, 11008, 4096), 6_738_415_616),
    "Llama-3.2-1B": (
        shipped("llama", 128256, 2048, 16, 32, 8, 8192, 131072, head_dim=64, tie_word_embeddings=True,
                rope_theta=500_000.0, rope_scaling=LLAMA3_SCALING),
        1_235_814_400,
    ),
    "TinyLlama-1.1B": (shipped("llama", 32000, 2048, 22, 32, 4, 5632, 2048), 1_100_048_384),
    "Mistral-7B-v0.3": (
        shipped("mistral", 32768, 4096, 32, 32, 8, 14336, 32768, rope_theta=1e6, sliding_window=None),
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (
        shipped("qwen2", 151936, 896, 24, 14, 2, 4864, 32768, tie_word_embeddings=True, rope_theta=1e6,
                sliding_window=32768, use_sliding_window=False, max_window_layers=24),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        shipped("qwen3", 151936, 1024, 28, 16, 8, 3072, 40960, head_dim=128, tie_word_embeddings=True,
                rope_theta=1e6, attention_bias=False, sliding_window=None, use_sliding_window=False),
        596_049_920,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_number_of_parameters_of_known_models(name):
    config, known = SHIPPED[name]
    with torch.device("meta"):  # transformers counts them, without the memory
        oracle = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert ModelConfig.from_huggingface(config).num_parameters == oracle.num_parameters() == known


GGUF = {
    "general.architecture": "llama", "llama.embedding_length": 96, "llama.block_count": 2,
    "llama.attention.head_count": 6, "llama.attention.head_count_kv": 2, "llama.feed_forward_length": 128,
    "llama.context_length": 256, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"general.architecture": "gemma"}, "general.architecture='gemma'"),
        ({"llama.expert_count": 8}, "llama.expert_count=8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window=64"),
        ({"llama.block_count": None}, "llama.block_count"),
    ],
)
def test_gguf_refused_by_name(changes, field):
    with pytest.raises(UnsupportedModelError) as error:
        ModelConfig.from_gguf({**GGUF, **changes}, {"token_embd.weight": (259, 96)})
    assert field in str(error.value)


def test_gguf_without_a_head_is_tied():
    assert ModelConfig.from_gguf(GGUF, {"token_embd.weight": (259, 96)}).tie_word_embeddings
    assert not ModelConfig.from_gguf(
        GGUF, {"token_embd.weight": (259, 96), "output.weight": (259, 96)}
    ).tie_word_embeddings
