"""Step 8: codes and scales at their edges, int8 layers against float64, smoothing, files, int8 keys and values."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import LLM
from minillm.continuous_batching import Scheduler, Sequence, generate_with
from minillm.model.llama import Linear
from minillm.model.sampling import SamplingParams
from minillm.model.weights import WeightsError, load_model, random_model
from minillm.naive_decode import NoCache
from minillm.paged_attention import BlockManager, PagedCache
from minillm.quantization import (
    CODE_MAX,
    FEW_ROWS,
    LAYERS,
    PROJECTIONS,
    Int8PagedCache,
    PackedCodes,
    QuantizedLinear,
    activation_absmax,
    calibration_tokens,
    chapters,
    dequantize,
    error_bound,
    int8_kv_bytes,
    linear_bytes,
    linear_w8a8,
    linear_w8a16,
    load_quantized,
    quantize,
    quantize_model,
    save_quantized,
    smooth,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def logits_of(model, tokens):
    with torch.inference_mode():
        return model.logits(model(tokens, torch.arange(len(tokens)), NoCache()))


# --- codes and scales -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_C37_rows_at_the_edges(dtype, scale_dtype):
    largest = torch.finfo(dtype).max
    spike = [0.0] * 7 + [1.0]
    rows = [[0.0] * 8, [1e-6] * 8, [1e-8] * 8, spike, [-x for x in spike], [-3.0, -1.0] * 4, [-largest] * 8,
            [largest, 1.0] * 4, [1e-40] * 8]  # fmt: skip
    x = torch.tensor(rows, dtype=torch.float64).to(dtype)
    codes, scale = quantize(x, scale_dtype)
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert codes.min() >= -CODE_MAX and codes.max() <= CODE_MAX
    assert scale.isfinite().all() and (scale > 0).all()
    error = (codes.double() * scale.double().unsqueeze(1) - x.double()).abs()
    assert (error <= scale.double().unsqueeze(1) / 2 * (1 + 1e-6)).all()
    assert torch.equal(dequantize(codes, scale)[0], torch.zeros(8))
    assert torch.equal(scale, scale.to(scale_dtype).float())


@given(st.integers(1, 5), st.integers(1, 70), st.floats(-30, 30), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_each_element_is_at_most_half_a_step_off(rows, size, exponent, seed):
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    codes, scale = quantize(x)
    assert codes.abs().amax(1).eq(CODE_MAX).all()
    assert ((codes * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()
    flipped, same_scale = quantize(-x)
    assert torch.equal(flipped, -codes) and torch.equal(scale, same_scale)


def test_a_row_that_is_not_finite_stays_visible_and_alone():
    x = torch.tensor([[1.0, 2.0], [float("nan"), 2.0], [float("inf"), 2.0], [3.0, -4.0]])
    codes, scale = quantize(x)
    back = dequantize(codes, scale)
    assert not back[1].isfinite().all() and not back[2].isfinite().all()
    assert torch.equal(back[[0, 3]], dequantize(*quantize(x[[0, 3]])))


def test_no_rows():
    codes, scale = quantize(torch.zeros(0, 8))
    assert codes.shape == (0, 8) and scale.shape == (0,)


# --- linear layers --------------------------------------------------------------------------------------------------


def layer(out, size, dtype, bias=False, mode="int8", seed=0):
    generator = torch.Generator().manual_seed(seed)
    linear = Linear(size, out, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.normal_(0, size**-0.5, generator=generator)
    linear = linear.requires_grad_(False).to(dtype)
    quantized = QuantizedLinear.from_linear(linear, mode)
    if dtype != torch.float16:
        quantized.pack(dtype)
    return linear, quantized


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 33])
@pytest.mark.parametrize("out, size", [(1, 8), (7, 77), (96, 96), (129, 64), (5000, 48)])
def test_every_way_to_multiply_gives_the_product_of_the_codes(out, size, rows, dtype, bias):
    _, quantized = layer(out, size, dtype, bias)
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ (quantized.codes.double() * quantized.scale.double().unsqueeze(1)).t()
    if bias:
        expected += quantized.bias.double()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for y in (quantized(x), linear_w8a16(x, quantized.codes, quantized.scale, quantized.bias)):
        assert y.dtype == dtype and y.shape == (rows, out)
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows, out, size", [(0, 5, 8), (1, 7, 77), (5, 96, 64), (40, 33, 576)])
def test_w8a8_adds_up_whole_numbers_exactly(rows, out, size):
    _, quantized = layer(out, size, torch.float32, mode="w8a8")
    x = 100 * torch.randn(rows, size)
    codes, scale = quantize(x)
    exact = codes.long() @ quantized.codes.long().t()
    expected = exact.double() * scale.double().unsqueeze(1) * quantized.scale.double()
    y = linear_w8a8(x, quantized.codes, quantized.scale)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(quantized(x), y)


def test_w8a8_of_extreme_codes():
    """All products at 127 * 127: hardware that adds pairs in 16 bits would saturate."""
    ones = torch.ones(3, 4096)
    codes = torch.full((8, 4096), 127, dtype=torch.int8)
    y = linear_w8a8(ones, codes, torch.full((8,), 1 / 127))
    torch.testing.assert_close(y, torch.full((3, 8), 4096.0))


def test_a_tokens_outlier_spoils_no_other_token():
    _, quantized = layer(16, 32, torch.float32, mode="w8a8")
    x = torch.randn(4, 32)
    alone = quantized(x[:1])
    x[2] *= 1e4
    assert torch.equal(quantized(x)[:1], alone)


@pytest.mark.parametrize("out, size", [(33, 64), (9, 1000)])
def test_the_error_is_within_its_bound(out, size):
    linear, quantized = layer(out, size, torch.float32)
    x = torch.randn(20, size)
    exact = x.double() @ linear.weight.double().t()
    error = (quantized(x).double() - exact).abs()
    bound = error_bound(x, quantized.scale)
    assert (error <= bound * 1.0001).all()
    assert bound.max() < 60 * error.max()  # and the bound is not merely large


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [PROJECTIONS, LAYERS, ("down_proj",)], ids=str)
@pytest.mark.parametrize("mode", ["int8", "w8a8"])
def test_C40_what_is_quantised_is_explicit_and_the_given_model_stays(tiny_model, mode, layers):
    before = {name: p.clone() for name, p in tiny_model.named_parameters()}
    quantized = quantize_model(tiny_model, mode, layers)
    names = {n for n, m in quantized.named_modules() if isinstance(m, QuantizedLinear)}
    assert {name.rpartition(".")[2] for name in names} == set(layers)
    assert len(names) == tiny_model.config.num_layers * len(set(layers) & set(PROJECTIONS)) + ("head" in layers)
    assert all(torch.equal(p, before[name]) for name, p in tiny_model.named_parameters())
    assert quantized.embedding.weight.data_ptr() == tiny_model.embedding.weight.data_ptr()
    if "head" not in layers and mode == "int8":
        assert quantized.head.weight.data_ptr() == tiny_model.head.weight.data_ptr()


def test_a_tied_head_gets_rows_of_its_own(tiny_config):
    model = random_model(dataclasses.replace(tiny_config, tie_word_embeddings=True), head_scale=1)
    for mode in ("int8", "w8a8"):
        quantized = quantize_model(model, mode, LAYERS)
        assert isinstance(quantized.head, QuantizedLinear)
        assert torch.equal(quantized.embedding.weight, model.head.weight)


def test_memory_of_the_linear_layers(tiny_model):
    half = tiny_model.__class__(tiny_model.config).to(torch.bfloat16)
    shapes = [(p.shape[0], p.shape[1]) for n, p in half.named_parameters() if p.dim() == 2 and "embedding" not in n]
    assert linear_bytes(half) == sum(2 * out * size for out, size in shapes)
    quantized = quantize_model(tiny_model, "int8", LAYERS)
    assert linear_bytes(quantized) == sum(out * (size + 4) for out, size in shapes)


@pytest.mark.parametrize("mode", ["int8", "w8a8"])
def test_logits_stay_close(tiny_model, mode):
    tokens = torch.arange(40) * 5 % 259
    exact, close = logits_of(tiny_model, tokens), logits_of(quantize_model(tiny_model, mode), tokens)
    assert (close - exact).norm() / exact.norm() < 0.05
    assert not torch.equal(close, exact)


def test_scales_stay_float32_in_any_dtype(tiny_model):
    quantized = quantize_model(tiny_model, "int8")
    scales = {n: p.clone() for n, p in quantized.named_parameters() if n.endswith(".scale")}
    moved = quantize_model(tiny_model, "int8").to(torch.bfloat16)
    for name, p in moved.named_parameters():
        if name in scales:
            assert torch.equal(p, scales[name]) and p.dtype == torch.float32
        assert p.dtype == (torch.int8 if name.endswith(".codes") else p.dtype)
    assert tiny_model.dtype == torch.float32  # it shares its memory with the one that was moved


@pytest.mark.parametrize(
    "changes, message",
    [({"mode": "int4"}, "quantize='int4': must be 'int8' or 'w8a8'"),
     ({"layers": ["embedding"]}, "layers='embedding': must be of qkv_proj")],
)  # fmt: skip
def test_wrong_settings_are_named(tiny_model, changes, message):
    with pytest.raises(ValueError, match=message):
        quantize_model(tiny_model, **changes)


def test_weights_that_are_not_finite_are_named(tiny_config):
    model = random_model(tiny_config)
    model.layers[1].mlp.down_proj.weight[3, 5] = float("inf")
    with pytest.raises(ValueError, match="layers.1.mlp.down_proj.weight: holds NaN or infinity"):
        quantize_model(model)


def test_a_quantised_model_is_not_quantised_again(tiny_model):
    with pytest.raises(ValueError, match="quantised already"):
        quantize_model(quantize_model(tiny_model))


# --- smoothing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [PROJECTIONS, LAYERS, ("o_proj",), ("down_proj", "qkv_proj")], ids=str)
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"tie_word_embeddings": True}], ids=str)
def test_a_smoothed_model_computes_the_same(tiny_config, layers, changes):
    config = dataclasses.replace(tiny_config, **changes)
    model = random_model(config, head_scale=1 if changes.get("tie_word_embeddings") else 10, dtype=torch.float64)
    tokens = torch.arange(50) * 7 % 259
    smoothed = smooth(model, activation_absmax(model, tokens.tolist()), layers=layers)
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), smoothed.parameters(), strict=False))
    torch.testing.assert_close(logits_of(smoothed, tokens), logits_of(model, tokens), rtol=1e-10, atol=1e-10)


def test_smoothing_helps_where_a_channel_is_an_outlier(tiny_config):
    model = random_model(tiny_config)
    with torch.no_grad():
        for each in model.layers:
            each.attention_norm.weight[3] = 60.0
            each.mlp_norm.weight[11] = 80.0
            each.attention.qkv_proj.weight[:, 3] /= 60.0
            each.mlp.gate_up_proj.weight[:, 11] /= 80.0
    tokens = torch.arange(64) * 7 % 259
    exact = logits_of(model, tokens)

    def error(quantized):
        return (logits_of(quantized, tokens) - exact).norm() / exact.norm()

    plain = error(quantize_model(model, "w8a8", calibration=[]))
    assert error(quantize_model(model, "w8a8", calibration=tokens.tolist())) < plain / 2


def test_the_calibration_text_is_none_of_what_is_measured(tiny_model):
    assert len(chapters()) == 8 and 90_000 < sum(map(len, chapters())) < 110_000
    assert tiny_model.tokenizer.decode(calibration_tokens(tiny_model, 50)) in chapters()[-1]
    assert chapters()[-1] not in "".join(chapters()[:-1])


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["int8", "w8a8"])
@pytest.mark.parametrize(
    "changes, layers",
    [({}, PROJECTIONS), ({"tie_word_embeddings": True}, PROJECTIONS),
     ({"tie_word_embeddings": True, "qkv_bias": True}, LAYERS)],
    ids=str,
)  # fmt: skip
def test_saved_and_loaded_is_the_same(tiny_config, tmp_path, mode, changes, layers):
    model = random_model(dataclasses.replace(tiny_config, **changes), head_scale=1, dtype=torch.bfloat16)
    quantized = quantize_model(model, mode, layers)
    save_quantized(quantized, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == quantized.config and loaded.dtype == torch.bfloat16
    for (name, a), (other, b) in zip(quantized.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b) and a.dtype == b.dtype
    tokens = torch.arange(9)
    assert torch.equal(logits_of(loaded, tokens), logits_of(quantized, tokens))
    with pytest.raises(FileExistsError, match="exists, must be a new one"):
        save_quantized(quantized, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "damage, message",
    [("missing", "no tensor 'layers.0.mlp.down_proj.codes'"), ("shape", "layers.0.mlp.down_proj.codes is"),
     ("range", "down_proj.codes holds -128"), ("scale", "down_proj.scale holds a scale that is not a positive"),
     ("left", "tensor 'stranger' has no place"), ("json", "minillm.json: damaged"), ("cut", "damaged or missing")],
)  # fmt: skip
def test_damaged_files_are_refused_by_name(tiny_model, tmp_path, damage, message):
    from safetensors.torch import load_file, save_file

    save_quantized(quantize_model(tiny_model), tmp_path / "model")
    path = tmp_path / "model" / "parameters.safetensors"
    tensors, key = load_file(path), "layers.0.mlp.down_proj.codes"
    if damage == "missing":
        del tensors[key]
    elif damage == "shape":
        tensors[key] = tensors[key][:, :-1].contiguous()
    elif damage == "range":
        tensors[key][0, 0] = -128
    elif damage == "scale":
        tensors["layers.0.mlp.down_proj.scale"][2] = 0
    elif damage == "left":
        tensors["stranger"] = torch.zeros(1)
    save_file(tensors, path)
    if damage == "json":
        (tmp_path / "model" / "minillm.json").write_text("{")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=message):
        load_quantized(tmp_path / "model")


def test_a_plain_model_has_no_quantised_file(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="not quantised"):
        save_quantized(tiny_model, tmp_path / "model")


# --- keys and values ------------------------------------------------------------------------------------------------


def answers(model, cache_type, num_blocks, block_size=4, budget=512, prefix_caching=True, batch=4):
    prompts = [[1, 2, 3], list(range(5, 40)), [7] * 12, list(range(5, 31))]
    memory = BlockManager(num_blocks, block_size, prefix_caching)
    cache = cache_type(model.config, num_blocks, block_size, model.dtype)
    for pool in cache.pools:
        pool.fill_(float("nan") if pool.is_floating_point() else 99)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    return [c.token_ids for c in generate_with(Scheduler(memory, batch, budget), cache, model, prompts, params)]


@pytest.mark.parametrize(
    "setting",
    [{"block_size": 1, "num_blocks": 400}, {"block_size": 7}, {"budget": 5}, {"batch": 1}, {"num_blocks": 16},
     {"prefix_caching": False}],
    ids=str,
)  # fmt: skip
def test_int8_kv_gives_the_same_tokens_however_it_is_scheduled(tiny_config, setting):
    model = random_model(tiny_config, dtype=torch.float64)
    usual = answers(model, Int8PagedCache, 100)
    assert answers(model, Int8PagedCache, **({"num_blocks": 100} | setting)) == usual


def test_int8_kv_is_close_to_plain(tiny_model):
    cache, plain = (kind(tiny_model.config, 20, 4, torch.float32) for kind in (Int8PagedCache, PagedCache))
    sequence = Sequence(0, list(range(1, 60)), 1)
    sequence.block_table = list(range(15))
    outputs = []
    for memory in (cache, plain):
        memory.prepare([(sequence, 59)])
        with torch.inference_mode():
            outputs.append(tiny_model(torch.tensor(sequence.token_ids), torch.arange(59), memory))
    assert 0 < (outputs[0] - outputs[1]).norm() / outputs[1].norm() < 0.03
    assert cache.k_scale.dtype == torch.float32 and cache.k.dtype == torch.int8


def test_int8_kv_bytes(tiny_config):
    cache = Int8PagedCache(tiny_config, 7, 4, torch.float32)
    assert sum(pool[:, :-1].nbytes for pool in cache.pools) == int8_kv_bytes(tiny_config, 28)
    wide = dataclasses.replace(tiny_config, head_dim=64)
    assert 2 * 2 * 2 * 2 * 64 * 28 / int8_kv_bytes(wide, 28) > 1.8  # K and V, bfloat16, 2 layers, 2 heads


# --- in the engine ----------------------------------------------------------------------------------------------------

PROMPTS = ["one", "a longer one than that", "x" * 60]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def tokens_of(model, **settings):
    return [c.token_ids for c in LLM(model, **settings).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"kv_dtype": "int8"},
                                      {"quantize": "int8", "kv_dtype": "int8"}], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "setting",
    [{"max_num_seqs": 1}, {"max_num_batched_tokens": 7}, {"num_blocks": 12, "block_size": 8},
     {"enable_chunked_prefill": False}],
    ids=str,
)  # fmt: skip
def test_a_quantised_engine_gives_the_same_tokens_in_any_setting(tiny_config, settings, setting):
    model = random_model(tiny_config, dtype=torch.float64)
    assert tokens_of(model, **settings, **setting) == tokens_of(model, **settings)


@pytest.mark.parametrize("step", ["naive_decode", "kv_cache", "prefill_decode", "static_batching", "paged_attention"])
def test_every_step_gives_the_quantised_models_tokens(tiny_config, step):
    import importlib

    quantized = quantize_model(random_model(tiny_config, dtype=torch.float64))
    generate = importlib.import_module(f"minillm.{step}").generate
    prompts = PROMPTS
    assert [c.token_ids for c in generate(quantized, prompts, PARAMS)] == tokens_of(quantized)


def test_int8_kv_holds_twice_the_sequences_in_the_same_memory(tiny_config):
    """By the engine's own metrics: how many run at a time when memory, not max_num_seqs, is the limit."""
    config = dataclasses.replace(tiny_config, head_dim=64)
    model = random_model(config, dtype=torch.bfloat16)
    memory = 32 * LLM(model, num_blocks=1, block_size=16).kv_bytes(16)  # 32 blocks of bfloat16
    running = {}
    for kv_dtype in ("auto", "int8"):
        num_blocks = memory // LLM(model, kv_dtype=kv_dtype, num_blocks=1).kv_bytes(16)
        llm = LLM(model, kv_dtype=kv_dtype, num_blocks=num_blocks, block_size=16, max_num_seqs=64, prefix_caching=False)
        for _ in range(40):
            llm.add_request("x" * 40, SamplingParams(max_tokens=8, ignore_eos=True))
        most = 0
        while llm.has_unfinished:
            llm.step()
            most = max(most, llm.metrics()["running"])
        running[kv_dtype] = most
    assert running["int8"] / running["auto"] > 1.8


def test_the_engine_leaves_the_given_model_as_it_is(tiny_model):
    llm = LLM(tiny_model, quantize="w8a8")
    assert llm.model is not tiny_model and isinstance(llm.model.layers[0].mlp.down_proj, QuantizedLinear)
    assert isinstance(tiny_model.layers[0].mlp.down_proj, Linear)


@pytest.mark.parametrize(
    "settings, message",
    [({"quantize": "int4"}, "quantize='int4': must be 'int8' or 'w8a8'"),
     ({"kv_dtype": "int4"}, "kv_dtype='int4': must be 'auto' or 'int8'"),
     ({"kv_dtype": "int8", "kv": "contiguous"}, "kv_dtype='int8': only with kv='paged'"),
     ({"kv_dtype": "int8", "batching": "static"}, "kv_dtype='int8': only with kv='paged'")],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_named(tiny_model, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(tiny_model, **settings)


def test_a_pass_outside_of_inference_mode_may_follow_one_inside(tiny_model):
    """What is kept between passes is no inference tensor."""
    quantized = quantize_model(tiny_model)
    ids = torch.arange(30)
    PackedCodes._scratch.__dict__.clear()  # as in a new process
    with torch.inference_mode():
        inside = quantized(ids, ids, NoCache())
    assert torch.equal(quantized(ids, ids, NoCache()), inside)
