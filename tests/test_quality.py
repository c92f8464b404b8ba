"""The quality report: against plain arithmetic on a tiny model, and words for what cannot be measured."""

import math

import pytest
import torch

from minillm import quality
from minillm.naive_decode import NoCache
from minillm.quantization import quantize_model

TEXT = "It was the best of times, it was the worst of times. " * 6


@pytest.fixture(scope="module")
def report(tiny_model):
    return quality.measure(tiny_model, tiny_model.tokenizer.encode(TEXT)[:100], window=40)


def test_the_unquantised_row_is_plain_cross_entropy(tiny_model, report):
    tokens = torch.tensor(tiny_model.tokenizer.encode(TEXT)[:100])
    losses = []
    for part in (tokens[:40], tokens[40:80], tokens[80:]):
        logits = tiny_model.logits(tiny_model(part, torch.arange(len(part)), NoCache()))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], part[1:], reduction="none"))
    losses = torch.cat(losses)
    assert report.num_tokens == len(losses) == 97
    assert math.isclose(report.rows[0].perplexity, losses.mean().exp().item(), rel_tol=1e-5)


def test_a_row_for_each_setting_and_an_error_for_each_layer(report, tiny_model):
    assert [row.setting for row in report.rows] == ["unquantised", *quality.SETTINGS]
    assert all(0 <= row.agreement <= 1 and row.kl > -1e-6 for row in report.rows)
    assert len(report.layers) == 4 * tiny_model.config.num_layers
    errors = [error.w8a16 for error in report.layers]
    assert errors == sorted(errors, reverse=True) and errors[-1] > 0 and errors[0] < 0.05
    for name in [row.setting for row in report.rows] + [error.layer for error in report.layers[:8]]:
        assert name in quality.table(report)


def test_kl_is_pytorchs(tiny_model, report):
    tokens = torch.tensor(tiny_model.tokenizer.encode(TEXT)[:100])
    total = 0.0
    for part in (tokens[:40], tokens[40:80], tokens[80:]):
        ours, other = (quality.log_probs(m, part, NoCache()) for m in (tiny_model, quantize_model(tiny_model)))
        total += torch.nn.functional.kl_div(other, ours, log_target=True, reduction="sum").item()
    row = next(row for row in report.rows if row.setting == "w8a16")
    assert math.isclose(row.kl, total / 97, rel_tol=1e-3, abs_tol=1e-7)


def test_progress_counts_every_pass(tiny_model):
    seen = []
    quality.measure(tiny_model, list(range(81)), ["w8a16"], window=40, on_pass=seen.append)
    assert len(seen) == quality.num_passes(81, ["w8a16"], 40) == 4
    assert quality.windows(list(range(81)), 40)[-1] == list(range(40, 80))


@pytest.mark.parametrize(
    "settings, tokens, message",
    [(["int4"], [1, 2], "settings='int4': must be of bf16, w8a16"), (["w8a16"], [1], "1 of them, must be at least 2")],
)
def test_what_cannot_be_measured_is_named(tiny_model, settings, tokens, message):
    with pytest.raises(ValueError, match=message):
        quality.measure(tiny_model, tokens, settings)
    with pytest.raises(ValueError, match="quantised already"):
        quality.measure(quantize_model(tiny_model), [1, 2])
