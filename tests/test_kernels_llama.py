"""The engine on the kernels: the same tokens as plain torch, and clear words where it cannot be had."""

import warnings

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.continuous_batching import Sequence, forward
from minillm.cuda_graphs import DecodeGraphs
from minillm.kernels import llama as kernel_llama
from minillm.kernels.build import KernelsUnavailable, load_kernels
from minillm.kernels.llama import KernelCache, KernelLlama
from minillm.model import sampling
from minillm.model.config import ModelConfig
from minillm.model.weights import random_model
from minillm.naive_decode import generate as naive_generate
from minillm.paged_attention import PagedCache

PROMPTS = ["a", "Hello there", "The quick brown fox jumps over the lazy dog. " * 2, "Hello there, again"]
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)


def tokens(llm: LLM, params=GREEDY, prompts=PROMPTS) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def naive_tokens(tiny_model):
    return [completion.token_ids for completion in naive_generate(tiny_model, PROMPTS, GREEDY)]


@pytest.mark.parametrize("schedule", ["in_order", "reversed", "random"])
def test_the_engine_on_kernels_gives_the_naive_loops_tokens(tiny_model, naive_tokens, monkeypatch, schedule):
    monkeypatch.setenv("CUDA_ON_CPU_SCHEDULE", schedule)
    assert tokens(LLM(tiny_model, kernels="cuda")) == naive_tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"kv": "contiguous", "max_num_seqs": 2},
        {"max_num_batched_tokens": 7},  # prompts in chunks, mixed with decode
        {"num_blocks": 9, "block_size": 16},  # less than all need: preemption
        {"block_size": 1, "num_blocks": 200},
        {"prefix_caching": False, "block_size": 5},
    ],
    ids=str,
)
def test_any_setting_gives_the_naive_loops_tokens(tiny_model, naive_tokens, settings):
    assert tokens(LLM(tiny_model, kernels="cuda", **settings)) == naive_tokens


@pytest.mark.parametrize("schedule", ["in_order", "random"])
@pytest.mark.parametrize(
    "settings",
    [{"quantize": "int8"}, {"quantize": "w8a8"}, {"kv_dtype": "int8"}, {"quantize": "int8", "kv_dtype": "int8"},
     {"kv_dtype": "int8", "max_num_batched_tokens": 7}, {"kv_dtype": "int8", "num_blocks": 9, "block_size": 16}],
    ids=str,
)  # fmt: skip
def test_int8_on_kernels_gives_plain_torchs_tokens(tiny_model, monkeypatch, settings, schedule):
    monkeypatch.setenv("CUDA_ON_CPU_SCHEDULE", schedule)
    assert tokens(LLM(tiny_model, kernels="cuda", **settings)) == tokens(LLM(tiny_model, kernels="torch", **settings))


@pytest.mark.parametrize("kind", ["biased", "normed", "multi-head", "one KV head", "untied"])
def test_every_kind_of_model_runs(kind):
    options = {
        "biased": {"qkv_bias": True},  # Qwen2
        "normed": {"qk_norm": True},  # Qwen3
        "multi-head": {"num_kv_heads": 6},
        "one KV head": {"num_kv_heads": 1, "head_dim": 40},
        "untied": {"tie_word_embeddings": False},
    }[kind]
    sizes = {"vocab_size": 259, "hidden_size": 48, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16,
             "intermediate_size": 40, "max_position_embeddings": 128}  # fmt: skip
    config = ModelConfig(**sizes | options)
    model = random_model(config)
    if kind in ("biased", "normed"):  # random_model leaves biases at zero and norms at one
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    prompts, params = ["abc", "hello, world"], SamplingParams(max_tokens=6, ignore_eos=True)
    expected = [completion.token_ids for completion in naive_generate(model, prompts, params)]
    assert tokens(LLM(model, kernels="cuda"), params, prompts) == expected


def test_draws_are_the_same_as_plain_torchs(tiny_model):
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, seed=i, temperature=0.8, top_k=30, top_p=0.9) for i in range(3)
    ]
    params += [SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2)]
    assert tokens(LLM(tiny_model, kernels="cuda"), params) == tokens(LLM(tiny_model, kernels="torch"), params)


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_logits_are_the_models(tiny_config, dtype, bound):
    """Prefill and decode, with a pool full of NaN (CASES C13)."""
    load_kernels("cpu")
    model = random_model(tiny_config).to(dtype)
    ids = torch.randint(259, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(model, wrap):
        memory = PagedCache(tiny_config, 8, 16, dtype)
        memory.k.fill_(float("nan")), memory.v.fill_(float("inf"))
        cache, sequence = wrap(memory), Sequence(0, list(ids), 10)
        sequence.block_table = [5, 2, 7]
        first = forward(model, cache, [(sequence, 40)])
        sequence.num_computed_tokens = 40
        sequence.token_ids.append(17)
        return torch.cat([first, forward(model, cache, [(sequence, 1)])]).float()

    expected = logits(model, lambda memory: memory)
    actual = logits(KernelLlama(model), KernelCache)
    assert expected.isfinite().all()
    scale = expected.abs().max()
    assert (actual - expected).abs().max() / scale < bound


def test_recorded_decode_passes_run_on_the_kernels(tiny_model):
    """What a GPU records as CUDA graphs, here without the recording: padded to 4 rows, the pad block at their end."""
    load_kernels("cpu")
    memory = PagedCache(tiny_model.config, 6, 16, torch.float32)
    model, cache = KernelLlama(tiny_model), KernelCache(memory)
    sequences = []
    for blocks, length in (([3], 5), ([0, 4], 20), ([1], 16)):
        sequence = Sequence(len(sequences), list(range(1, length + 1)), 10)
        sequence.block_table = blocks
        sequences.append(sequence)
    forward(model, cache, [(s, s.num_tokens - 1) for s in sequences])
    for sequence in sequences:
        sequence.num_computed_tokens = sequence.num_tokens - 1
    step = [(s, 1) for s in sequences]
    torch.testing.assert_close(DecodeGraphs(model, cache).run(step), forward(model, cache, step))


def test_sampling_on_the_kernels_refuses_what_sampling_refuses():
    load_kernels("cpu")
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    for sample in (sampling.sample, kernel_llama.sample):
        with pytest.raises(FloatingPointError, match="row 1 has no finite maximum"):
            sample(logits, [SamplingParams()] * 2, [[]] * 2, [[]] * 2)


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 5.0])
def test_extreme_temperatures(temperature):
    load_kernels("cpu")
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(4)]
    expected = sampling.sample(logits, params, [[]] * 4, [[]] * 4)
    assert kernel_llama.sample(logits, params, [[]] * 4, [[]] * 4) == expected


def test_auto_on_a_cpu_is_plain_torch(tiny_model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LLM(tiny_model).kernels == "torch"


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kernels": "triton"}, "kernels='triton': must be 'auto' or 'torch' or 'cuda'"),
        ({"kernels": "cuda", "batching": "static"}, "kernels='cuda': no kernel reads static batching's rectangle"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(tiny_model, settings, words):
    with pytest.raises(ValueError, match=words):
        LLM(tiny_model, **settings)


def test_models_that_no_kernel_runs_are_refused_by_name(tiny_config, tiny_model):
    with pytest.raises(ValueError, match="not in torch.float64, must be float32, float16 or bfloat16"):
        LLM(random_model(tiny_config).double(), kernels="cuda")
    config = ModelConfig(vocab_size=259, hidden_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=12,
                         intermediate_size=8, max_position_embeddings=64)  # fmt: skip
    with pytest.raises(ValueError, match="head_dim=12, must be a multiple of 8, at most 256"):
        LLM(random_model(config), kernels="cuda")


def test_without_a_toolchain_auto_warns_and_cuda_is_an_error(tiny_model, monkeypatch):
    def missing(device_type):
        raise KernelsUnavailable("no nvcc: install the CUDA toolkit")

    monkeypatch.setattr(kernel_llama, "load_kernels", missing)
    with pytest.raises(KernelsUnavailable, match="install the CUDA toolkit"):
        LLM(tiny_model, kernels="cuda")

    class OnGpu:  # as far as the choice looks at a model
        config, dtype, device = tiny_model.config, torch.float32, torch.device("cuda")

    with pytest.warns(RuntimeWarning, match="plain torch is used, since no nvcc: install the CUDA toolkit"):
        assert kernel_llama.resolve_kernels("auto", OnGpu) == "torch"
