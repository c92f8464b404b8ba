"""Batch-1 decode of step 3 against transformers' generate: same weights, same prompt, one process, alternating.

The time is that of the tokens after the first (generation of N tokens less generation of one), so that neither side's
prefill or set-up counts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _harness import Check, arguments, report
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from minillm.model.sampling import SamplingParams
from minillm.model.weights import load_model, parameter_sources
from minillm.prefill_decode import generate


def in_transformers(model) -> LlamaForCausalLM:
    """The same weights in transformers' model."""
    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.intermediate_size, max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=True,
    )  # fmt: skip
    ours, state = dict(model.named_parameters()), {}
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for name, sources in parameter_sources(c).items():
        rows = {1: None, 2: [c.intermediate_size] * 2, 3: [q, kv, kv]}[len(sources)]
        parts = [ours[name]] if rows is None else ours[name].split(rows)
        state |= {source: part.contiguous() for source, part in zip(sources, parts, strict=True)}
    peer = LlamaForCausalLM(config).to(model.dtype)
    missing, unexpected = peer.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    peer.tie_weights()
    return peer.eval()


@torch.inference_mode()
def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per generation")
    parser.add_argument("--repeats", type=int, default=7, help="alternating rounds")
    args = parser.parse_args()
    model = load_model(dtype=args.dtype, device="cpu")
    peer = in_transformers(model)
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "Write a story about a lighthouse."}])

    def minillm(n: int) -> list[int]:
        return generate(model, [ids], SamplingParams(max_tokens=n, ignore_eos=True))[0].token_ids

    def transformers(n: int) -> list[int]:
        out = peer.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()

    sides = {"minillm": minillm, "transformers": transformers}
    per_token: dict[str, list[float]] = {side: [] for side in sides}
    same = 0
    for round_number in tqdm(range(args.repeats + 1), desc="rounds", file=sys.stderr):
        outputs = {}
        for side, run in sides.items():
            start = time.perf_counter()
            run(1)
            middle = time.perf_counter()
            outputs[side] = run(args.tokens)
            elapsed = (time.perf_counter() - middle) - (middle - start)
            if round_number:  # the first round warms up
                per_token[side].append(elapsed / (args.tokens - 1))
        a, b = outputs.values()
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    rows = [
        {"side": side, "dtype": args.dtype, "ms_per_token": 1e3 * statistics.median(times),
         "tokens_per_s": 1 / statistics.median(times), "same_first_tokens": same}
        for side, times in per_token.items()
    ]  # fmt: skip
    ratios = [t / m for m, t in zip(per_token["minillm"], per_token["transformers"], strict=True)]
    report(args, rows, [Check("transformers' time over minillm's, median of rounds", statistics.median(ratios), 1.5)])


if __name__ == "__main__":
    main()
