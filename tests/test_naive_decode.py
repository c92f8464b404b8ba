"""Step 1 against transformers' generate."""

import torch
import transformers
from test_llama import SIZES, save_oracle

from minillm.model.sampling import SamplingParams
from minillm.model.weights import load_model
from minillm.naive_decode import NoCache, decode_loop, generate


def test_greedy_tokens_equal_transformers(tmp_path):
    oracle = save_oracle(transformers.LlamaConfig(**SIZES), tmp_path)
    with torch.no_grad():
        oracle.lm_head.weight *= 10  # a random model's logits are so flat that argmax flips on rounding
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    prompts = ["a", "hello world", "the quick brown fox"]
    ours = generate(model, prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    for prompt, c in zip(prompts, ours, strict=True):
        ids = torch.tensor([model.tokenizer.encode(prompt)])
        theirs = oracle.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert c.token_ids == theirs[0, ids.shape[1] :].tolist()


def test_on_text_gets_each_prompts_text(tiny_model):
    shown = []
    completions = generate(tiny_model, ["abc", "x"], SamplingParams(max_tokens=12), on_text=shown.append)
    assert "".join(shown) == "".join(c.text for c in completions)


def test_each_step_runs_the_whole_sequence(tiny_model, monkeypatch):
    passes = []
    forward = tiny_model.forward
    monkeypatch.setattr(
        tiny_model, "forward", lambda t, p, c: passes.append((t.tolist(), p.tolist())) or forward(t, p, c)
    )
    tokens = decode_loop(tiny_model, [1, 2, 3], NoCache(), lambda logits: int(logits.argmax()))
    a, _ = next(tokens), next(tokens)
    assert passes == [([1, 2, 3], [0, 1, 2]), ([1, 2, 3, a], [0, 1, 2, 3])]
