"""Step 0 against transformers and float64."""

import pytest
import torch
import transformers

from minillm.model.config import ModelConfig, UnsupportedModelError, llama3_rope_factors
from minillm.model.llama import apply_rope, attention, attention_by_hand, rms_norm, rope_table
from minillm.model.tokenizer import byte_tokenizer
from minillm.model.weights import default_gguf_path, load_model
from minillm.naive_decode import NoCache

SIZES = dict(
    vocab_size=259, hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    intermediate_size=128, max_position_embeddings=16384, rms_norm_eps=1e-5,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192, rope_theta=500_000.0,
)  # fmt: skip
ORACLES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama_tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3_scaling": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2_tied": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=40),
}


def save_oracle(config, path, seed=0):
    torch.manual_seed(seed)
    oracle = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            # Norms and biases start at 1 and 0, which would hide that one is not read.
            p.normal_(1.0 if "norm" in name else 0.0, 0.2 if p.dim() == 1 else p.shape[1] ** -0.5)
    oracle.save_pretrained(path)
    byte_tokenizer().save(path)
    return oracle


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_transformers(name, tmp_path):
    oracle = save_oracle(ORACLES[name], tmp_path)
    model = load_model(tmp_path, dtype="float32")
    tokens = torch.randint(0, 256, (50,), generator=torch.Generator().manual_seed(1))
    # The far positions are where RoPE's scaling shows (C38). transformers multiplies position and frequency in
    # float32 there, which is off by 5e-4 radian at 9000; our table is computed in float64.
    for start, tolerance in ((0, 1e-4), (9000, 1e-3)):
        positions = torch.arange(start, start + 50)
        with torch.inference_mode():
            expected = oracle(tokens[None], position_ids=positions[None]).logits[0]
            ours = model.logits(model(tokens, positions, NoCache()))
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)
    assert model.config.num_parameters == sum(p.numel() for p in oracle.parameters())


@pytest.mark.slow
def test_smollm2_gives_the_tokens_of_transformers(default_model):
    path = default_gguf_path()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for prompt in ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a land far away,"):
        ids = default_model.tokenizer.encode(prompt)
        expected = oracle.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0]  # [len(ids) + 64], the prompt first
        # One pass instead of 64: if argmax after each prefix is the next token, greedy decode is the same tokens.
        with torch.inference_mode():
            hidden = default_model(expected[:-1], torch.arange(len(expected) - 1), NoCache())
            ours = default_model.logits(hidden[len(ids) - 1 :]).argmax(dim=-1)
        assert ours.tolist() == expected[len(ids) :].tolist()


def test_C38_llama3_factors():
    factors = llama3_rope_factors(64, 500_000.0, LLAMA3)
    assert factors[:15] == (1.0,) * 15
    assert all(1 < f < 32 for f in factors[15:18])
    assert factors[18:] == pytest.approx((32.0,) * 14)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_C38_both_spellings_and_unknown_types(key):
    scaling = {k: v for k, v in LLAMA3.items() if k not in ("rope_type", "rope_theta")}
    hf = dict(SIZES, model_type="llama", rope_theta=500_000.0)
    config = ModelConfig.from_huggingface({**hf, "rope_scaling": {**scaling, key: "llama3"}})
    assert config.rope_factors == llama3_rope_factors(16, 500_000.0, LLAMA3)
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        ModelConfig.from_huggingface({**hf, "rope_scaling": {key: "yarn", "factor": 4.0}})


def test_C41_rope_table_stays_float32(tmp_path):
    save_oracle(transformers.LlamaConfig(**{**SIZES, "head_dim": 128}), tmp_path)
    for model in (load_model(tmp_path, dtype="bfloat16"), load_model(tmp_path, dtype="float32").to(torch.bfloat16)):
        table = model.rope_table()
        assert table.dtype == torch.float32
        frequencies = 10_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
        for position in (1, 64, 512, 4095):
            angles = position * frequencies
            expected = torch.cat([angles.cos(), angles.sin()])
            torch.testing.assert_close(table[position].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("head_dim", [16, 40, 80, 100])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (9, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("N, M", [(1, 1), (1, 17), (5, 17), (17, 17)])
def test_fused_attention_equals_the_manual_path(N, M, heads, kv_heads, head_dim):
    torch.manual_seed(0)
    q, k, v = torch.randn(N, heads, head_dim), torch.randn(M, kv_heads, head_dim), torch.randn(M, kv_heads, head_dim)
    torch.testing.assert_close(attention(q, k, v), attention_by_hand(q, k, v), atol=1e-5, rtol=1e-5)
    half = [x.bfloat16() for x in (q, k, v)]
    torch.testing.assert_close(attention(*half).float(), attention_by_hand(q, k, v), atol=0.03, rtol=0.03)


def test_rms_norm_against_float64():
    torch.manual_seed(0)
    x, weight = torch.randn(7, 96) * 100, torch.randn(96)
    x64 = x.double()
    expected = x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5)
    assert rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5).dtype == torch.bfloat16


def test_rope_against_complex_numbers_in_float64(tiny_config):
    # Channels i and i + head_dim/2 are one complex number, turned by position * theta^(-2i / head_dim).
    torch.manual_seed(0)
    x, positions = torch.randn(4, 3, 16), torch.tensor([0, 1, 17, 255])
    turns = torch.outer(positions.double(), 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8))  # [4, 8]
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(turns), turns)[:, None]
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(apply_rope(x, rope_table(tiny_config)[positions]).double(), expected, atol=1e-5, rtol=0)


def test_rope_is_a_rotation_by_position(tiny_config):
    torch.manual_seed(0)
    table = rope_table(tiny_config)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    # Scores depend on the distance of two tokens only.
    scores = [(apply_rope(q, table[[p + 3]]) * apply_rope(k, table[[p]])).sum() for p in (0, 50, 200)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-4, rtol=0)
