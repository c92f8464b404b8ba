"""Step 8: smaller numbers.

What changes: how weights, keys and values are stored, and nothing else. Decode waits for memory, so half the bytes are
up to twice the speed; and keys and values of half the size let twice as many sequences run.

A row of numbers becomes whole numbers from -127 to 127 and one scale: x is about code * scale, with the row's largest
magnitude at 127 (absmax, symmetric: zero stays exactly zero). What a row is decides the quality:

- weights: an output channel. It has a scale of its own, which the product's result is multiplied by.
- activations: a token. Its scale is found when it comes (dynamic), so no token spoils another.
- keys and values: a token's head.

"int8" (W8A16) quantises weights only. The product reads half the bytes and computes as before. "w8a8" quantises
activations too, so that the product is one of whole numbers, which hardware does faster. But a few channels of the
activations are far larger than all others and take the scale from them; `smooth` moves part of their size into the
weights first.

Sources: Dettmers et al. 2022 (LLM.int8(), absmax and outliers), Xiao et al. 2023 (SmoothQuant, section 4), Hooper et
al. 2024 (KVQuant, on keys and values).
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .model.config import ModelConfig
from .model.llama import Linear, Llama
from .model.tokenizer import Tokenizer
from .model.weights import WeightsError
from .naive_decode import NoCache
from .paged_attention import PagedCache, take_slots

CODE_MAX = 127  # not -128: a symmetric range, so that -x has the code of x, negated
MODES = ("int8", "w8a8")
PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LAYERS = (*PROJECTIONS, "head")  # that can be quantised; the embedding never is
FEW_ROWS = 4  # up to here torch's int8 kernel is the fastest product on a CPU; see QuantizedLinear.forward
CHUNK_ROWS = 4096  # of a weight that are widened at a time: a few MB, which stay in the cache
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a row of zeros: no division by zero, and codes of zero
TEXT = Path(__file__).parent / "data" / "news_from_nowhere.txt"  # William Morris, 1890; Project Gutenberg 3261


# --- rows of numbers ------------------------------------------------------------------------------------------------


def quantize(x: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Each row to int8, symmetric, its largest magnitude at 127.

    x [..., D], floats -> codes [..., D] int8 in -127..127, scale [...] float32: x is codes * scale, each element at
    most scale / 2 off. scale_dtype: round scales up to what this dtype can hold, before the codes are chosen (rounded
    afterwards, a whole row would be off). A row that is not finite gets a scale that is not, and so stays visible.

    >>> codes, scale = quantize(torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]))
    >>> codes.tolist(), scale[0].item() == 1 / 127
    ([[64, -127, 32], [0, 0, 0]], False)
    >>> dequantize(codes, scale)
    tensor([[ 0.5039, -1.0000,  0.2520],
            [ 0.0000,  0.0000,  0.0000]])
    """
    x = x.float()
    scale = (x.abs().amax(-1) / CODE_MAX).clamp(min=SMALLEST_SCALE)
    if scale_dtype != torch.float32:
        rounded = scale.to(scale_dtype)
        up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
        scale = torch.where(rounded.float() < scale, up, rounded).float()
    codes = (x / scale.unsqueeze(-1)).round_().clamp_(-CODE_MAX, CODE_MAX)
    return codes.to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes [..., D] int8, scale [...] float32 -> [..., D], each row's codes times its scale"""
    return (codes.float() * scale.unsqueeze(-1)).to(dtype)


# --- linear layers --------------------------------------------------------------------------------------------------


def linear_w8a16(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias with an int8 weight. x [N, in]; codes [out, in] int8, scale [out] float32; bias [out] -> [N, out].

    A row's scale is the same for all its products, so it is multiplied in once, at the end.
    """
    out = F.linear(x.float(), codes.float()) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_w8a8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with the activations in int8 too, each token with a scale of its own. The products are added up as whole
    numbers, exactly: 127 * 127 * in fits into 32 bits up to in = 133,000."""
    token_codes, token_scale = quantize(x)
    if x.device.type == "cpu":
        total = torch._int_mm(token_codes, codes.t())  # [N, out] int32
    else:  # on a GPU _int_mm wants more than 16 rows; the fast way there is the kernel of step 7
        total = token_codes.double() @ codes.double().t()
    out = total.float() * token_scale.unsqueeze(-1) * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def error_bound(x: Tensor, scale: Tensor) -> Tensor:
    """The most that an int8 weight can change x W^T. x [N, in], scale [out] -> [N, out].

    Each weight is at most scale / 2 off, and is multiplied by its element of x. In practice errors cancel, and are
    some sqrt(in) times smaller.
    """
    return x.float().abs().sum(-1, keepdim=True) * (scale / 2)


class QuantizedLinear(nn.Module):
    """A linear layer with an int8 weight: codes [out, in] int8, scale [out] float32; mode "int8" or "w8a8"."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None = None, mode: str = "int8"):
        super().__init__()
        self.mode = mode
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.packed: PackedCodes | None = None

    @classmethod
    def from_linear(cls, linear: Linear, mode: str, name: str = "weight") -> QuantizedLinear:
        """ValueError, with the layer's name, for a weight that is not finite."""
        if not linear.weight.isfinite().all():
            raise ValueError(f"{name}: holds NaN or infinity, which has no int8 code")
        # torch's CPU kernel wants scales in the activations' dtype: bfloat16 holds these exactly.
        codes, scale = quantize(linear.weight.detach(), scale_dtype=torch.bfloat16)
        return cls(codes, scale, linear.bias, mode)

    def pack(self, dtype: torch.dtype) -> None:
        """A second copy of the codes, as PackedCodes: what `forward` multiplies many rows of this dtype with."""
        if self.mode == "int8" and self.codes.device.type == "cpu":
            self.packed = PackedCodes(self.codes, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]. The one place that chooses among the ways to multiply.

        Measured on 2 cores with AVX-512 (benchmarks/quantization.py): torch's int8 kernel reads the codes as they are,
        and wins up to 4 rows; it reads them again for each 4. Beyond, the codes are widened, a few MB at a time,
        and the usual product reads them from the cache. In float32 torch's int8 kernel is not vectorised.
        """
        if self.mode == "w8a8":
            return linear_w8a8(x, self.codes, self.scale, self.bias)
        if len(x) <= FEW_ROWS and x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.shape[1] % 16 == 0:
            out = torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scale.to(x.dtype))
        elif self.packed is not None and self.packed.dtype == x.dtype:
            out = self.packed.multiply(x).mul_(self.scale)
        else:
            return linear_w8a16(x, self.codes, self.scale, self.bias)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn, recurse=True):  # what .to() calls
        scale = self.scale.data
        super()._apply(fn, recurse)
        self.scale.data = scale.to(self.codes.device)  # stays float32 in a model of any dtype
        self.packed = None
        return self


class PackedCodes:
    """Codes in the order in which oneDNN reads packed weights (see `Linear.pack`).

    Widened from int8 in that order, they are a packed weight at once, and no reordering is left to do. The order is
    found by packing the codes as floats, which holds them exactly.
    """

    _scratch = threading.local()  # a packed weight of each shape, overwritten by every layer in turn

    def __init__(self, codes: Tensor, dtype: torch.dtype):
        self.dtype, self.shape = dtype, codes.shape
        self.chunks = []
        for chunk in codes.split(CHUNK_ROWS):
            packed = torch.ops.mkldnn._reorder_linear_weight(chunk.to(dtype))
            self.chunks.append((len(chunk), _memory_of(packed, dtype).to(torch.int8)))

    def multiply(self, x: Tensor) -> Tensor:
        """x [N, in] -> x codes^T [N, out]"""
        parts = []
        for rows, codes in self.chunks:
            weight, memory = self._scratch_for(rows)
            memory.copy_(codes)
            parts.append(torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _scratch_for(self, rows: int) -> tuple[Tensor, Tensor]:
        key = (rows, self.shape[1], self.dtype)
        kept = self._scratch.__dict__
        if key not in kept:
            with torch.inference_mode(False):  # else it could not be overwritten outside of inference mode
                packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(rows, self.shape[1], dtype=self.dtype))
                kept[key] = packed, _memory_of(packed, self.dtype)
        return kept[key]


def _memory_of(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of an opaque oneDNN tensor, as a flat tensor that shares it. Valid as long as `packed` is."""
    address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


# --- models ---------------------------------------------------------------------------------------------------------


def quantize_model(
    model: Llama, mode: str = "int8", layers: Iterable[str] = PROJECTIONS, calibration: list[int] | None = None
) -> Llama:
    """A model with these linear layers in int8. What is not quantised is shared with the given model, which stays as it
    is; so does the embedding, also where the head is tied to it.

    The head is left out by default: the logits come out of it, so its errors are not averaged by later layers, and a
    tied head saves no memory, since the embedding stays (with "head" it gets int8 rows of its own).

    mode: "int8" or "w8a8". calibration: for w8a8 the token ids that activations are measured on, to smooth them
    (default: a chapter of the text that this package ships; []: do not smooth). ValueError for another mode or layer, a
    weight that is not finite, or a model that is quantised already.
    """
    layers = tuple(layers)
    if mode not in MODES:
        raise ValueError(f"quantize={mode!r}: must be {' or '.join(map(repr, MODES))}")
    for name in layers:
        if name not in LAYERS:
            raise ValueError(f"layers={name!r}: must be of {', '.join(LAYERS)}")
    if is_quantized(model):
        raise ValueError(f"quantize={mode!r}: the model is quantised already")
    if mode == "w8a8" and (calibration is None or calibration):
        tokens = calibration_tokens(model) if calibration is None else calibration
        model = smooth(model, activation_absmax(model, tokens), layers=layers)
    quantized = share(model)
    for name, linear in _linears(model, layers):
        _replace(quantized, name, QuantizedLinear.from_linear(linear, mode, f"{name}.weight"))
    pack_layers(quantized)
    return quantized


def is_quantized(model: Llama) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def linear_bytes(model: Llama) -> int:
    """Bytes of the weights of all linear layers, scales included, packed copies left out."""
    total = 0
    for module in model.modules():
        if isinstance(module, Linear):
            total += module.weight.nbytes
        elif isinstance(module, QuantizedLinear):
            total += module.codes.nbytes + module.scale.nbytes
    return total


def _linears(model: Llama, layers: Iterable[str] = LAYERS) -> list[tuple[str, Linear]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, Linear) and n.rpartition(".")[2] in layers]


def share(model: Llama) -> Llama:
    """Another model over the same memory: what is done to it (another module, `.to()`) leaves the first as it is."""
    kept = [model.tokenizer, *(linear.packed for _, linear in _linears(model) if linear.packed is not None)]
    memo = {id(thing): thing for thing in kept}
    memo |= {id(p): nn.Parameter(p.data, requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _replace(model: Llama, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def pack_layers(model: Llama) -> None:
    """Pack all linear layers, int8 or not, for a CPU's kernels, where torch has them for this dtype."""
    supported = torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])
    if model.device.type == "cpu" and torch.backends.mkldnn.is_available() and model.dtype in supported:
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.pack(model.dtype)
            elif isinstance(module, Linear) and module.packed is None:
                module.pack()


# --- smoothing ------------------------------------------------------------------------------------------------------


def calibration_tokens(model: Llama, num_tokens: int = 1024) -> list[int]:
    """The beginning of the shipped text's last chapter, which is not part of what quality is measured on."""
    return model.tokenizer.encode(chapters()[-1])[:num_tokens]


def chapters() -> list[str]:
    """The shipped text: eight chapters of "News from Nowhere", 98 kB of English prose."""
    return ["CHAPTER" + chapter for chapter in TEXT.read_text(encoding="utf-8").split("CHAPTER")[1:]]


@torch.inference_mode()
def activation_absmax(model: Llama, tokens: list[int], window: int = 512) -> dict[str, Tensor]:
    """The largest magnitude of each input channel of each linear layer -> {layer's name: [in] float32}"""
    if not tokens:
        raise ValueError("calibration=[]: empty, must be at least one token")
    largest: dict[str, Tensor] = {}

    def watch(name: str):
        def hook(module, inputs):
            seen = inputs[0].abs().amax(0).float()
            largest[name] = torch.maximum(largest[name], seen) if name in largest else seen

        return hook

    hooks = [linear.register_forward_pre_hook(watch(name)) for name, linear in _linears(model)]
    try:
        for part in torch.tensor(tokens, device=model.device).split(min(window, model.config.max_position_embeddings)):
            model.logits(model(part, torch.arange(len(part), device=model.device), NoCache()))
    finally:
        for hook in hooks:
            hook.remove()
    return largest


def smooth(
    model: Llama, activation_max: dict[str, Tensor], alpha: float = 0.6, layers: Iterable[str] = PROJECTIONS
) -> Llama:
    """A model that computes the same, with the outliers of its activations moved into the weights (SmoothQuant).

    Input channel j of a linear layer is divided by s_j and column j of the weight multiplied by it, with
    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha). Who makes the channel does the division: the norm before, or the rows
    of the values (for o_proj) and of the up projection (for down_proj). s is a power of two, so that this is exact in
    any dtype. The given model stays as it is.
    """
    smoothed, config = share(model), model.config
    if "head" in layers and config.tie_word_embeddings:
        _replace(smoothed, "head", _copy(model.head))  # its columns change, the embedding's must not

    def divide(module: nn.Module, rows: slice, s: Tensor) -> None:
        for kind in ("weight", "bias"):
            old = getattr(module, kind, None)
            if old is not None:
                new = old.detach().clone()
                new[rows] /= s.view(-1, *[1] * (new.dim() - 1)).to(new.dtype)
                setattr(module, kind, nn.Parameter(new, requires_grad=False))

    def move(name: str, module: nn.Module, rows: slice, per_source: int = 1, shared: int = 1) -> None:
        """For the linear layer `name`, whose input is made by these rows of `module`. With grouped queries one value
        head feeds `shared` query heads of `per_source` channels: they must have the same s."""
        linear = smoothed.get_submodule(name)
        x_max, w_max = activation_max[name], linear.weight.abs().amax(0).float()
        if shared > 1:  # [kv_heads, shared, per_source]
            x_max, w_max = (m.view(-1, shared, per_source).amax(1).flatten() for m in (x_max, w_max))
        s = x_max.pow(alpha) / w_max.pow(1 - alpha).clamp(min=1e-12)
        s = torch.where((x_max > 0) & (w_max > 0), s.log2().round().exp2(), 1.0).clamp(2.0**-14, 2.0**14)
        divide(module, rows, s)
        if shared > 1:
            s = s.view(-1, 1, per_source).expand(-1, shared, -1).flatten()
        linear.weight = nn.Parameter(linear.weight.detach() * s.to(linear.weight.dtype), requires_grad=False)

    for name, _ in _linears(model, layers):
        parent, _, kind = name.rpartition(".")
        block = smoothed.get_submodule(parent.rpartition(".")[0])
        if kind == "qkv_proj":
            move(name, block.attention_norm, slice(None))
        elif kind == "gate_up_proj":
            move(name, block.mlp_norm, slice(None))
        elif kind == "o_proj":
            kv_size = config.num_kv_heads * config.head_dim
            group = config.num_heads // config.num_kv_heads
            move(name, block.attention.qkv_proj, slice(-kv_size, None), config.head_dim, group)
        elif kind == "down_proj":
            move(name, block.mlp.gate_up_proj, slice(config.intermediate_size, None))
        else:
            move(name, smoothed.norm, slice(None))
    for _, linear in _linears(smoothed):
        linear.packed = None  # of the weights before
    return smoothed


def _copy(linear: Linear) -> Linear:
    new = copy.copy(linear)  # the module, not its parameters
    new._parameters = dict(linear._parameters)
    return new


# --- files ----------------------------------------------------------------------------------------------------------


def save_quantized(model: Llama, directory: str | os.PathLike) -> None:
    """Write a quantised model, with its tokenizer, as a directory that `load_model` takes. ValueError if it is not
    quantised; FileExistsError if there is something already. Nothing half-written is left."""
    directory = Path(directory)
    if not is_quantized(model):
        raise ValueError("model: not quantised, nothing that its own file does not hold")
    if directory.exists():
        raise FileExistsError(f"directory={str(directory)!r}: exists, must be a new one")
    directory.parent.mkdir(parents=True, exist_ok=True)
    modes = {n: m.mode for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".partial-") as temporary:
        partial = Path(temporary) / "model"
        partial.mkdir()
        save_file({name: p.data for name, p in model.named_parameters()}, partial / "parameters.safetensors")
        description = {"dtype": str(model.dtype).removeprefix("torch."), "quantized": modes}
        description["config"] = dataclasses.asdict(model.config)
        (partial / "minillm.json").write_text(json.dumps(description, indent=1))
        model.tokenizer.save(partial)
        partial.rename(directory)


def load_quantized(directory: str | os.PathLike) -> Llama:
    """Read what `save_quantized` wrote. WeightsError for what is missing, left over or damaged, by its name."""
    directory = Path(directory)
    try:
        description = json.loads((directory / "minillm.json").read_text())
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in description["config"].items()}
        config, modes = ModelConfig(**fields), description["quantized"]
        dtype = getattr(torch, description["dtype"])
        with torch.device("meta"):
            model = Llama(config).to(dtype)
            for name, mode in modes.items():
                linear = model.get_submodule(name)
                scale = torch.empty(len(linear.weight), dtype=torch.float32)
                codes = torch.empty(linear.weight.shape, dtype=torch.int8)
                _replace(model, name, QuantizedLinear(codes, scale, linear.bias, mode))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{directory / 'minillm.json'}: damaged: {error}") from None
    try:
        with safe_open(directory / "parameters.safetensors", framework="pt") as file:
            left = set(file.keys())
            for name, want in list(model.named_parameters()):
                if name not in left:
                    raise WeightsError(f"{directory}: no tensor {name!r}")
                tensor = file.get_tensor(name)
                if (tensor.shape, tensor.dtype) != (want.shape, want.dtype):
                    raise WeightsError(f"{directory}: {name} is {list(tensor.shape)} {tensor.dtype}, "
                                       f"must be {list(want.shape)} {want.dtype}")  # fmt: skip
                if name.endswith(".codes") and tensor.min() < -CODE_MAX:
                    raise WeightsError(f"{directory}: {name} holds -128, must be from -127 to 127")
                if name.endswith(".scale") and not (tensor.isfinite() & (tensor > 0)).all():
                    raise WeightsError(f"{directory}: {name} holds a scale that is not a positive number")
                _replace_parameter(model, name, tensor)
                left.discard(name)
    except (SafetensorError, FileNotFoundError) as error:
        raise WeightsError(f"{directory / 'parameters.safetensors'}: damaged or missing: {error}") from None
    if left:
        raise WeightsError(f"{directory}: tensor {min(left)!r} has no place in the model")
    if config.tie_word_embeddings and "head" not in modes:
        model.head.weight = model.embedding.weight
    model.tokenizer = Tokenizer.from_directory(directory)
    pack_layers(model)
    return model


def _replace_parameter(model: Llama, name: str, tensor: Tensor) -> None:
    module, _, parameter = name.rpartition(".")
    setattr(model.get_submodule(module), parameter, nn.Parameter(tensor, requires_grad=False))


# --- keys and values ------------------------------------------------------------------------------------------------


def int8_kv_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Bytes of keys and values of `num_tokens` tokens: a code for each channel, a float32 scale for each head."""
    return 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4) * num_tokens


class Int8PagedCache(PagedCache):
    """PagedCache with keys and values in int8: k, v hold codes, k_scale, v_scale [layers, num_blocks + 1, block_size,
    kv_heads] float32 a scale for each token and head.

    A token is quantised once, when it is stored, and attention reads what is stored, also of the pass under way. So a
    sequence's tokens do not depend on how it was cut into chunks, preempted or found in the prefix cache.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device="cpu"):
        super().__init__(config, num_blocks, block_size, torch.int8, device)
        self.dtype = dtype  # of what attention computes in
        self.k_scale = torch.empty(self.k.shape[:-1], dtype=torch.float32, device=device)
        self.v_scale = torch.empty_like(self.k_scale)

    @property
    def pools(self) -> list[Tensor]:
        return [self.k, self.v, self.k_scale, self.v_scale]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        new = [*quantize(k), *quantize(v)]
        for pool, values in zip((self.k, self.k_scale, self.v, self.v_scale), new, strict=True):
            pool[layer].flatten(0, 1).index_copy_(0, self.slot_mapping, values)

    def take(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(
            dequantize(take_slots(codes[layer].flatten(0, 1), slots), take_slots(scale[layer].flatten(0, 1), slots),
                       self.dtype)
            for codes, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )  # fmt: skip
