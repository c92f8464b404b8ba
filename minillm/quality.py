"""What a setting of step 8 costs in quality, measured before it is recommended.

Perplexity says how well the model predicts a text: exp of the mean loss, so 1% more is 0.01 nats a token. It hides
what changes both ways and averages out, so the quantised model is also compared with the unquantised one token by
token: how often is the likeliest next token the same (top-1 agreement), and how far apart are the two distributions
(KL divergence, in nats)? The text is read in windows; each begins without a past.

All is computed in float32 arithmetic. bfloat16 arithmetic alone changes about as many tokens as int8 weights do (it has
a row of its own), and would hide what is measured. Sources: Frantar et al. 2022 (GPTQ, perplexity by windows); Dutta et
al. 2024 ("Accuracy is not all you need", on agreement and KL).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .continuous_batching import Sequence as Request
from .model.llama import Linear, Llama
from .naive_decode import NoCache
from .paged_attention import DEFAULT_BLOCK_SIZE, num_blocks_for
from .quantization import (
    PROJECTIONS,
    Int8PagedCache,
    QuantizedLinear,
    chapters,
    is_quantized,
    pack_layers,
    quantize_model,
    share,
)

WINDOW = 512

SETTINGS = {
    "bf16": "no quantisation, bfloat16 arithmetic: what the choice of dtype changes",
    "w8a16": "int8 weights",
    "w8a8": "int8 weights and activations, smoothed",
    "w8a8-unsmoothed": "int8 weights and activations",
    "kv-int8": "int8 keys and values",
    "w8a16+kv-int8": "int8 weights, keys and values",
}


@dataclass(frozen=True)
class Quality:
    """One setting on the whole text."""

    setting: str
    perplexity: float
    perplexity_change: float  # relative to the unquantised model: 0.01 is 1% worse
    agreement: float  # part of the tokens whose likeliest successor is the unquantised model's
    kl: float  # mean over tokens of KL(unquantised || setting), nats


@dataclass(frozen=True)
class LayerError:
    """|| quantised output - output || / || output || of one linear layer, on its real inputs."""

    layer: str
    w8a16: float
    w8a8: float  # without smoothing


@dataclass(frozen=True)
class Report:
    num_tokens: int  # that were predicted
    rows: list[Quality]  # the unquantised model first
    layers: list[LayerError]  # the largest error with int8 weights first


def text_tokens(model: Llama, num_tokens: int, text: str | None = None) -> list[int]:
    """The beginning of a text, by default of the shipped one, without the chapter that smoothing is calibrated on."""
    tokens = model.tokenizer.encode("".join(chapters()[:-1]) if text is None else text)
    return tokens[:num_tokens]


@torch.inference_mode()
def measure(
    model: Llama,
    tokens: list[int],
    settings: Sequence[str] = tuple(SETTINGS),
    window: int = WINDOW,
    on_pass: Callable[[str], None] = lambda setting: None,
) -> Report:
    """Run the settings side by side over windows of `tokens`. `on_pass(setting)` is called after each pass, of which
    there are `num_passes`: for a progress bar. ValueError for an unknown setting, too few tokens, or a model that is
    quantised already or not in float32."""
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(f"settings={setting!r}: must be of {', '.join(SETTINGS)}")
    if len(tokens) < 2:
        raise ValueError(f"tokens: {len(tokens)} of them, must be at least 2")
    if is_quantized(model):
        raise ValueError("model: quantised already, so there is nothing to compare with")
    if model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"model: in {model.dtype}, must be in float32")
    window = min(window, model.config.max_position_embeddings)
    runs = {setting: _run_of(model, setting, window) for setting in settings}

    losses = {setting: [] for setting in ("unquantised", *settings)}  # of each predicted token
    same, kl = ({setting: [] for setting in settings} for _ in range(2))
    for part in windows(tokens, window):
        part = torch.tensor(part, device=model.device)
        reference = log_probs(model, part, NoCache())
        losses["unquantised"].append(_loss(reference, part))
        on_pass("unquantised")
        for setting, (quantized, new_cache) in runs.items():
            logs = log_probs(quantized, part, new_cache(len(part)))
            losses[setting].append(_loss(logs, part))
            same[setting].append(logs.argmax(-1) == reference.argmax(-1))
            kl[setting].append((reference.exp() * (reference - logs)).sum(-1))
            on_pass(setting)

    perplexity = {setting: torch.cat(parts).double().mean().exp().item() for setting, parts in losses.items()}
    base = perplexity["unquantised"]
    rows = [Quality("unquantised", base, 0.0, 1.0, 0.0)]
    for setting in settings:
        agreement, divergence = (torch.cat(parts).double().mean().item() for parts in (same[setting], kl[setting]))
        rows.append(Quality(setting, perplexity[setting], perplexity[setting] / base - 1, agreement, divergence))
    return Report(sum(map(len, losses["unquantised"])), rows, layer_errors(model, tokens[:window]))


def windows(tokens: list[int], window: int) -> list[list[int]]:
    """The tokens in pieces; a last one of a single token predicts nothing and is left out."""
    return [tokens[i : i + window] for i in range(0, len(tokens) - 1, window)]


def num_passes(num_tokens: int, settings: Sequence[str], window: int = WINDOW) -> int:
    return len(range(0, num_tokens - 1, window)) * (len(settings) + 1)


def log_probs(model: Llama, tokens: Tensor, cache) -> Tensor:
    """tokens [N] -> [N - 1, vocab] float32 or wider: what the model says of tokens 1 to N - 1"""
    hidden = model(tokens, torch.arange(len(tokens), device=tokens.device), cache)
    logits = model.logits(hidden[:-1])
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _loss(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return -log_probs.gather(1, tokens[1:, None])[:, 0]


def _run_of(model: Llama, setting: str, window: int) -> tuple[Llama, Callable[[int], object]]:
    """-> the setting's model, and what gives it a cache for a window of n tokens."""
    if setting == "bf16":
        narrow = share(model).to(torch.bfloat16)
        pack_layers(narrow)
        return narrow, lambda n: NoCache()
    if setting.startswith("w8"):
        mode = "w8a8" if setting.startswith("w8a8") else "int8"
        quantized = quantize_model(model, mode, calibration=[] if setting == "w8a8-unsmoothed" else None)
    else:
        quantized = model
    if not setting.endswith("kv-int8"):
        return quantized, lambda n: NoCache()
    blocks = num_blocks_for(window, DEFAULT_BLOCK_SIZE)
    cache = Int8PagedCache(model.config, blocks, DEFAULT_BLOCK_SIZE, model.dtype, model.device)

    def new_cache(n: int) -> Int8PagedCache:
        sequence = Request(0, [0] * n, 1)
        sequence.block_table = list(range(num_blocks_for(n, DEFAULT_BLOCK_SIZE)))
        cache.prepare([(sequence, n)])
        return cache

    return quantized, new_cache


@torch.inference_mode()
def layer_errors(model: Llama, tokens: list[int]) -> list[LayerError]:
    """Each linear layer alone, on the inputs that it has in the unquantised model. The largest error comes first."""
    errors = []

    def watch(name: str):
        def hook(linear, inputs, output):
            def error(mode: str) -> float:
                quantized = QuantizedLinear.from_linear(linear, mode, name)(inputs[0])
                return ((quantized - output).norm() / output.norm()).item()

            errors.append(LayerError(name, error("int8"), error("w8a8")))

        return hook

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name.rpartition(".")[2] in PROJECTIONS
    ]
    try:
        ids = torch.tensor(tokens, device=model.device)
        model(ids, torch.arange(len(ids), device=model.device), NoCache())
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(errors, key=lambda e: -e.w8a16)


def table(report: Report, num_layers: int = 8) -> str:
    """The report as text: the settings, then the layers with the largest errors."""
    lines = [f"{'setting':16} {'perplexity':>10} {'change':>8} {'agreement':>10} {'KL, nats':>9}  what it is"]
    for row in report.rows:
        what = SETTINGS.get(row.setting, f"float32 arithmetic, {report.num_tokens} tokens predicted")
        lines.append(f"{row.setting:16} {row.perplexity:10.3f} {row.perplexity_change:+8.2%} {row.agreement:10.1%} "
                     f"{row.kl:9.5f}  {what}")  # fmt: skip
    lines += ["", f"{'layer by layer, largest error first':36} {'w8a16':>7} {'w8a8-unsmoothed':>16}"]
    lines += [f"{e.layer:36} {e.w8a16:7.2%} {e.w8a8:16.2%}" for e in report.layers[:num_layers]]
    return "\n".join(lines)


def as_json(report: Report) -> dict:
    return dataclasses.asdict(report)
