"""Text to token ids and back: the `tokenizers` package does the splitting, this file the three things around it
that engines get wrong. Rebuilding a tokenizer from GGUF metadata; chat prompts in which typed text can never
become a control token; and streaming text without ever showing half a character.
"""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Byte-level BPE first splits text with one of these rules, named by `tokenizer.ggml.pre`.
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_NAMES = ("gpt-2", "gpt2")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_SPACE = "▁"  # SentencePiece writes a space as this character


class Tokenizer:
    """A tokenizer, its special ids and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ):
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self._added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self._control = {str(t.content): i for i, t in self._added.items() if t.special}
        decoder = json.loads(backend.to_str())["decoder"]
        self._byte_level = _is_byte_level(decoder)
        # SentencePiece puts a space before a text's first word, and takes it away again from the text's start.
        self.strips_first_space = _strips_first_space(decoder)

    # --- where it comes from ---

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` where they are.
        Raises FileNotFoundError or ValueError."""
        path = Path(path)
        if not (path / "tokenizer.json").exists():
            raise FileNotFoundError(f"{path}/tokenizer.json: missing (tokenizer.model alone is not read)")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the Rust side raises plain Exception
            raise ValueError(f"{path}/tokenizer.json: damaged: {error}") from None
        file = path / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        template = config.get("chat_template")
        if isinstance(template, list):  # several templates by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if (path / "chat_template.jinja").exists():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")

        def token_id(name: str) -> int | None:
            token = config.get(name)
            return backend.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None

        eos = config.get("eos_token_ids") or [i for i in [token_id("eos_token")] if i is not None]
        return cls(backend, bos_token_id=token_id("bos_token"), eos_token_ids=eos, chat_template=template)

    def save(self, directory: str | Path) -> None:
        """Write what `from_directory` reads back to an equal tokenizer."""
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"), pretty=False)
        bos = None if self.bos_token_id is None else self.backend.id_to_token(self.bos_token_id)
        config = {"bos_token": bos, "eos_token_ids": self.eos_token_ids, "chat_template": self.chat_template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    @classmethod
    def from_gguf(cls, metadata: dict) -> Tokenizer:
        """Rebuild the tokenizer from GGUF metadata (plain Python values). ValueError for a kind not known."""
        kind = metadata.get("tokenizer.ggml.model")
        builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
        if kind not in builders:
            raise ValueError(f"tokenizer.ggml.model={kind!r}: must be one of {', '.join(builders)}")
        try:
            backend = builders[kind](metadata)
        except KeyError as error:
            raise ValueError(f"GGUF metadata has no {error}") from None
        except ValueError:
            raise
        except Exception as error:  # the Rust side raises plain Exception
            raise ValueError(f"tokenizer.ggml: {error}") from None
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
        # 3: control tokens, matched whole and never shown; 4: user-defined, matched whole and shown
        backend.add_special_tokens([AddedToken(t, special=True) for t, k in zip(tokens, types, strict=False) if k == 3])
        backend.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=False) if k == 4])
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        # Llama 3's files often leave the flag out; llama.cpp's default for them is the same.
        starts = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
        if metadata.get("tokenizer.ggml.add_bos_token", starts) and bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        eos = tuple(dict.fromkeys(i for i in ends if i is not None))
        return cls(backend, bos_token_id=bos, eos_token_ids=eos, chat_template=metadata.get("tokenizer.chat_template"))

    # --- text to ids ---

    @cached_property
    def vocab_size(self) -> int:
        """One above the highest id; with gaps between the ids, more than there are tokens."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt. Control tokens written in it are control tokens: whoever writes a raw prompt
        writes the template by hand. BOS by the tokenizer's own rule, unless `add_special_tokens` is False."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def render_chat(self, messages: Sequence[dict]) -> str:
        """The prompt text that the chat template makes of messages, the assistant's turn opened at its end."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template: give it a plain prompt")
        _check_messages(messages)
        ids = {"bos_token": self.bos_token_id, "eos_token": next(iter(self.eos_token_ids), None)}
        texts = {name: "" if i is None else self.backend.id_to_token(i) for name, i in ids.items()}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **texts)
        except Exception as error:  # a template is a program, and fails in as many ways
            raise ValueError(f"messages: the chat template refuses them: {error}") from None

    def encode_chat(self, messages: Sequence[dict]) -> list[int]:
        """Token ids of a chat prompt.

        The render is the whole truth, as in transformers: BOS is there if the template writes it and not
        otherwise. Text inside a message is text, also where it looks like a control token: before rendering
        each such string is replaced by a private-use character (so that the template may still trim or split),
        and put back, as text, when the template's own control tokens have been found.
        """
        _check_messages(messages)
        joined = "".join(m["role"] + m["content"] for m in messages)
        typed = [c for c in self._control if c in joined]
        if not typed:
            return self.encode(self.render_chat(messages), add_special_tokens=False)
        unused = (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in joined)
        stand_in = dict(zip(sorted(typed, key=len, reverse=True), unused, strict=False))  # longest first

        def hide(text: str) -> str:
            return re.sub("|".join(map(re.escape, stand_in)), lambda m: stand_in[m[0]], text)

        rendered = self.render_chat([{**m, "role": hide(m["role"]), "content": hide(m["content"])} for m in messages])
        shown = {mark: text for text, mark in stand_in.items()}
        controls = sorted(self._control, key=len, reverse=True)
        ids = []
        for piece in re.split(f"({'|'.join(map(re.escape, controls))})", rendered):
            if piece in self._control:
                ids.append(self._control[piece])
            elif piece:
                ids += self._encode_as_text(re.sub("|".join(shown), lambda m: shown[m[0]], piece))
        return ids

    def _encode_as_text(self, text: str) -> list[int]:
        self._text_backend.encode_special_tokens = True  # tokenizers' name for: treat them as ordinary text
        return self._text_backend.encode(text, add_special_tokens=False).ids

    @cached_property
    def _text_backend(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self.backend.to_str())

    @cached_property
    def _template(self):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

        def raise_exception(message):
            raise TemplateError(message)

        environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.chat_template)

    # --- ids to text ---

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids; control tokens are not shown. By construction the same as streaming them."""
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for what follows the prompt."""
        return Detokenizer(self, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; none for a control token. A token is not always whole
        characters: "漢" may be three tokens of one byte each."""
        if token_id in self._added:
            token = self._added[token_id]
            return b"" if token.special else str(token.content).encode()
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""  # a row of a padded vocabulary
        if self._byte_level and all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        if self._byte_level:
            return token.encode()  # plain text in a byte-level vocabulary: taken as it is, as `tokenizers` does
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE, " ").encode()


class Detokenizer:
    """Token ids in, text out, whole characters only.

    A UTF-8 decoder holds back the bytes of an incomplete character. Completeness decides, not validity: a byte
    that can never become a character is shown as U+FFFD at once and does not block the stream.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_first_space
        for token_id in prompt_ids:  # a prompt may end within a character, or be empty but for BOS
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The characters that this token completes, often one word, sometimes none."""
        data = self._tokenizer.token_bytes(token_id)
        if data and self._at_start:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """At the end: one U+FFFD if the text breaks off within a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def byte_tokenizer() -> Tokenizer:
    """A token per byte (id = byte), then <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258.

    >>> byte_tokenizer().encode("hi<|im_end|>")
    [104, 105, 258]
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: b for c, b in _BYTE_OF.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, eos_token_ids=(256, 258), chat_template=CHATML)


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one printable character, itself where it is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_characters()


def _decoder_parts(decoder: dict | None) -> list[dict]:
    return [] if decoder is None else decoder.get("decoders", [decoder])


def _strips_first_space(decoder: dict | None) -> bool:
    return any(
        part["type"] == "Strip" or (part["type"] == "Metaspace" and part["prepend_scheme"] != "never")
        for part in _decoder_parts(decoder)
    )


def _is_byte_level(decoder: dict | None) -> bool:
    kinds = [part["type"] for part in _decoder_parts(decoder)]
    if "ByteLevel" in kinds:
        return True
    if {"Metaspace", "Replace"} & set(kinds):
        return False
    raise ValueError(f"tokenizer decoder {kinds}: must be ByteLevel, Metaspace or Replace with ByteFallback")


def _check_messages(messages: Sequence[dict]) -> None:
    if not messages:
        raise ValueError("messages: empty, must be at least one {'role': ..., 'content': ...}")
    for m in messages:
        if not (isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)):
            raise ValueError(f"messages: {m!r} must be a dict with role and content, both text")


def _byte_level_bpe(metadata: dict) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    split, normalizer = None, None
    if pre in _GPT2_NAMES:
        first = []
    elif pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre in _LLAMA3_NAMES:
        split, first = _LLAMA3, []
    elif pre == "qwen2":
        split, first, normalizer = _QWEN2, [], normalizers.NFC()
    else:
        known = ", ".join((*_GPT2_NAMES, "smollm", *_LLAMA3_NAMES, "qwen2"))
        raise ValueError(f"tokenizer.ggml.pre={pre!r}: must be one of {known}")
    if split:
        first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    # Llama 3 has words in its vocabulary that no merge leads to: they are taken whole.
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3_NAMES))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    return backend


def _sentencepiece_bpe(metadata: dict) -> tokenizers.Tokenizer:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    # SentencePiece has scores in place of merges: the pair whose union has the best score goes first.
    merges = [
        (-scores[i], token, token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda m: (m[0], vocab[m[1]], vocab[m[2]], vocab[m[3]]))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(vocab, [m[2:] for m in merges], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    normalize = [normalizers.Replace(" ", _SPACE)]
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):  # put one space in front, and take it away again
        normalize.insert(0, normalizers.Prepend(_SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normalize)
    backend.decoder = decoders.Sequence(decode)
    return backend
