"""Step 3: chunks do not change the result; the roofline counts what there is to count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minillm.kv_cache import ContiguousCache
from minillm.model.config import ModelConfig
from minillm.model.llama import attention_by_hand
from minillm.model.sampling import SamplingParams
from minillm.model.weights import random_model
from minillm.prefill_decode import PassCost, generate, pass_cost, prefill


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 70), chunk_size=st.integers(1, 80))
def test_chunks_do_not_change_the_result(tiny_model, length, chunk_size):
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    whole, chunked = (ContiguousCache(tiny_model.config, length, torch.float32) for _ in range(2))
    expected = prefill(tiny_model, ids, whole, chunk_size=length)
    torch.testing.assert_close(prefill(tiny_model, ids, chunked, chunk_size), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunked.k, whole.k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunked.v, whole.v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_chunk_size_gives_the_same_tokens(tiny_model, chunk_size):
    params = SamplingParams(max_tokens=30)
    expected = [c.token_ids for c in generate(tiny_model, ["abc", "a longer prompt"], params)]
    assert [
        c.token_ids for c in generate(tiny_model, ["abc", "a longer prompt"], params, chunk_size=chunk_size)
    ] == expected


def test_chunk_size_must_be_positive(tiny_model):
    with pytest.raises(ValueError, match="chunk_size=0: must be at least 1"):
        generate(tiny_model, ["abc"], chunk_size=0)


class ByHand(ContiguousCache):
    """Attention as plain products: what the FLOP counter can see."""

    def attend(self, layer, q, k, v):
        self.k[layer, self.start : self.length] = k
        self.v[layer, self.start : self.length] = v
        return attention_by_hand(q, self.k[layer, : self.length], self.v[layer, : self.length])


@pytest.mark.parametrize("num_tokens, context", [(1, 1), (1, 50), (40, 0), (7, 33)])
def test_flops_against_torchs_own_counter(tiny_model, num_tokens, context):
    cache = ByHand(tiny_model.config, context + num_tokens, torch.float32)
    cache.k.zero_()
    cache.v.zero_()
    cache.extend(context)
    cache.extend(num_tokens)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        hidden = tiny_model(torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens), cache)
        tiny_model.logits(hidden[-1:])
    config = tiny_model.config
    # By hand, the products with future keys are computed too, and masked; the roofline does not count them.
    future = num_tokens * (num_tokens - 1) // 2
    masked = config.num_layers * 4 * config.num_heads * config.head_dim * future
    assert counter.get_total_flops() == pass_cost(config, num_tokens, context, torch.float32).flops + masked


def test_bytes_of_a_decode_step(tiny_config):
    model = random_model(tiny_config)
    matrices = sum(p.nbytes for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    row = tiny_config.hidden_size * 4  # one row of the embedding
    token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, bytes
    assert pass_cost(tiny_config, 1, 100, torch.float32).bytes == matrices + row + 100 * token + 2 * token


def test_prefill_is_bound_by_compute_and_decode_by_memory():
    llama_8b = ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 8192)
    bandwidth, flop_rate = 3.35e12, 989e12  # an H100's datasheet
    ridge = flop_rate / bandwidth
    assert pass_cost(llama_8b, 1, 1000, torch.bfloat16).arithmetic_intensity < 2 < ridge
    assert pass_cost(llama_8b, 2048, 0, torch.bfloat16).arithmetic_intensity > ridge
    assert PassCost(flops=10, bytes=4).seconds(bandwidth=2.0, flop_rate=10.0) == 2.0
