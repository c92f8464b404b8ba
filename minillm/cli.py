"""The `minillm` command: generate, chat, ladder, quality, doctor, grade.

A wrong input is one line on stderr and exit code 2; Ctrl-C is exit code 130. Results go to stdout, progress to
stderr, so that `--json` can be piped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from . import grading

# torch is imported by the commands that need it: `--help` and a typing error should not wait for it.


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        message = " ".join(str(error).split())
        print(f"minillm: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minillm",
        description="LLM inference from scratch, one step at a time, on a real model.",
        epilog="Start with: minillm ladder, or minillm chat 'What is the capital of France?'",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", default="smollm2-135m-instruct", help="a name, a .gguf file, a directory or a hub id")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")

    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="tokens of output at most")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0 is off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest P; 1 is off")
    sampling.add_argument("--seed", type=int, default=None, help="the same text each time")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated"
    )

    p = commands.add_parser("generate", parents=[model, sampling], formatter_class=defaults, help="continue a text")
    p.add_argument("prompt", help="the text to continue, as it is (no chat template)")
    p.add_argument("--json", action="store_true", help="one object on stdout instead of text")
    p.set_defaults(run=_generate)

    p = commands.add_parser("chat", parents=[model, sampling], formatter_class=defaults, help="ask, or talk")
    p.add_argument("message", nargs="?", help="one question; without it a conversation (Ctrl-D ends it)")
    p.add_argument("--system", help="a system message")
    p.set_defaults(run=_chat)

    p = commands.add_parser("ladder", parents=[model], formatter_class=defaults, help="every step on the same prompts")
    p.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens per prompt")
    p.add_argument("--dtype", default="float32", help="float32 (the tokens are compared exactly), bfloat16 or float16")
    p.add_argument("--steps", metavar="A,B", help="only these steps, comma-separated")
    p.add_argument("--output", default="ladder.png", metavar="FILE", help="where the picture goes")
    p.add_argument("--json", action="store_true", help="one object on stdout instead of the table")
    p.set_defaults(run=_ladder)

    p = commands.add_parser("quality", parents=[model], formatter_class=defaults, help="what int8 costs in quality")
    p.add_argument("--tokens", type=int, default=5120, metavar="N", help="of the text that is read")
    p.add_argument("--text", metavar="FILE", help="another text than the one that is shipped (English prose, 1890)")
    p.add_argument("--settings", metavar="A,B", help="only these, comma-separated")
    p.add_argument("--output", default="quality.png", metavar="FILE", help="where the picture goes")
    p.add_argument("--json", action="store_true", help="one object on stdout instead of the table")
    p.set_defaults(run=_quality)

    p = commands.add_parser("doctor", help="what this machine has, and what each missing thing costs")
    p.add_argument("--json", action="store_true", help="one object on stdout instead of text")
    p.set_defaults(run=_doctor)

    p = commands.add_parser("grade", help="grade a lesson's exercise")
    grading.add_arguments(p)
    p.set_defaults(run=grading.main)
    return parser


def _sampling_params(args):
    from .model.sampling import SamplingParams

    return SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k,
                          top_p=args.top_p, seed=args.seed, stop=args.stop)  # fmt: skip


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _generate(args) -> None:
    params = _sampling_params(args)  # a wrong value is said before the model loads
    if not args.prompt:
        raise ValueError("prompt='': empty, must be at least one token")
    from .model.weights import load_model
    from .prefill_decode import generate

    model = load_model(args.model, args.dtype, args.device)
    [completion] = generate(model, [args.prompt], params, on_text=None if args.json else _show)
    if args.json:
        from dataclasses import asdict

        print(json.dumps(asdict(completion)))
    else:
        print()
        _print_speed(completion)


def _chat(args) -> None:
    params = _sampling_params(args)
    if args.message == "":
        raise ValueError("message='': empty, must be a question")
    from .model.weights import load_model
    from .prefill_decode import generate

    model = load_model(args.model, args.dtype, args.device)
    messages = [{"role": "system", "content": args.system}] if args.system else []

    def answer(question: str) -> None:
        prompt = model.tokenizer.encode_chat([*messages, {"role": "user", "content": question}])
        [completion] = generate(model, [prompt], params, on_text=_show)
        print()
        messages.extend([{"role": "user", "content": question}, {"role": "assistant", "content": completion.text}])
        _print_speed(completion)

    if args.message is not None:
        return answer(args.message)
    print("Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    while True:
        try:
            question = input("> ")
        except EOFError:
            return print(file=sys.stderr)
        if not question.strip():
            continue
        try:
            answer(question)
        except KeyboardInterrupt:
            print("  (interrupted)", file=sys.stderr)
        except ValueError as error:  # the conversation has outgrown the context, say
            print(f"minillm: error: {error}", file=sys.stderr)


def _print_speed(completion) -> None:
    m = completion.metrics
    if m.ttft_s is not None and sys.stderr.isatty():
        tpot = f", {m.tpot_s * 1e3:.0f} ms a token" if m.tpot_s is not None else ""
        print(
            f"[{len(completion.prompt_ids)} + {len(completion.token_ids)} tokens, first after {m.ttft_s:.2f} s{tpot}]",
            file=sys.stderr,
        )


def _chosen(option: str, given: str | None, allowed) -> list[str]:
    """What a comma-separated option names; all that there is where it is not given."""
    chosen = given.split(",") if given else list(allowed)
    for name in chosen:
        if name not in allowed:
            raise ValueError(f"{option}={name!r}: must be of {', '.join(allowed)}")
    return chosen


def _output(args) -> Path:
    output = Path(args.output)
    if not output.parent.is_dir():
        raise ValueError(f"--output={args.output!r}: no such directory")
    return output


def _ladder(args) -> int:
    from tqdm import tqdm

    from . import ladder, plots
    from .model.weights import load_model

    steps = _chosen("--steps", args.steps, ladder.STEPS)
    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens={args.max_tokens}: must be at least 1")
    output = _output(args)
    model = load_model(args.model, args.dtype, args.device)
    total = ladder.num_tokens(steps, model, args.max_tokens)
    with tqdm(total=total, unit="token", file=sys.stderr) as bar:

        def progress(step: str) -> None:
            bar.set_description(step)
            bar.update()

        rows = ladder.run(model, steps, args.max_tokens, on_token=progress)
        bar.update(total - bar.n)  # tokens within a character bring no text of their own
    plots.ladder(rows).savefig(output, dpi=120)
    print(json.dumps(ladder.as_json(rows, model)) if args.json else ladder.table(rows))
    print(f"picture: {output}", file=sys.stderr)
    return 0 if all(row.same_tokens for row in rows) or args.dtype != "float32" else 1


def _quality(args) -> None:
    from tqdm import tqdm

    from . import plots, quality
    from .model.weights import load_model

    settings = _chosen("--settings", args.settings, quality.SETTINGS)
    if args.tokens < 2:
        raise ValueError(f"--tokens={args.tokens}: must be at least 2")
    output = _output(args)
    text = Path(args.text).read_text(encoding="utf-8") if args.text else None
    model = load_model(args.model, "float32", args.device)
    tokens = quality.text_tokens(model, args.tokens, text)
    with tqdm(total=quality.num_passes(len(tokens), settings), unit="pass", file=sys.stderr) as bar:

        def progress(setting: str) -> None:
            bar.set_description(setting)
            bar.update()

        report = quality.measure(model, tokens, settings, on_pass=progress)
    plots.quality(report).savefig(output, dpi=120)
    print(json.dumps(quality.as_json(report)) if args.json else quality.table(report))
    print(f"picture: {output}", file=sys.stderr)


def _doctor(args) -> None:
    from . import doctor

    findings = doctor.examine()
    print(json.dumps([f.__dict__ for f in findings]) if args.json else doctor.report(findings))
