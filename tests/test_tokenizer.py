"""Text to ids and back, against transformers; streams in whole characters; chat that cannot be injected."""

import json

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from minillm.model.tokenizer import CHATML, Tokenizer, byte_tokenizer
from minillm.model.weights import default_gguf_path

TEXTS = [
    "Hello world", " leading space", "  two", "def f(x):\n    return x + 1\n\n\n", "12345 67,890.12", "don't we'll I'M",
    "漢字かな交じり文", "🙂👩‍👩‍👧‍👦 family", "tabs\tand\r\nlines", "naïve café", "<|im_start|>user\nhi<|im_end|>",
    "a  b   c",
    "",
]  # fmt: skip


@pytest.fixture(scope="session")
def smollm2(default_model):
    return default_model.tokenizer


@pytest.fixture(scope="session")
def oracle():
    path = default_gguf_path()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(smollm2, text):
    # transformers' own GGUF conversion leaves out SmolLM2's digit rule, so the oracle is built from the rules
    # that its tokenizer.json on the hub states: digits one by one, then GPT-2's regex.
    reference = tokenizers.Tokenizer.from_str(smollm2.backend.to_str())
    reference.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    assert smollm2.encode(text) == reference.encode(text).ids


@pytest.mark.parametrize("text", [t for t in TEXTS if not any(c.isdigit() for c in t)])
def test_ids_equal_transformers_gguf_conversion(smollm2, oracle, text):
    assert smollm2.encode(text) == oracle.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_the_text_back(smollm2, text):
    shown = text.replace("<|im_start|>", "").replace("<|im_end|>", "")  # control tokens are not shown
    assert smollm2.decode(smollm2.encode(text)) == shown


CHATS = {
    "plain": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "system empty": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    "turns": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "\n\nc  "))],
    "system repeated": [{"role": r, "content": r} for r in ("system", "user", "system", "user")],
}


@pytest.mark.parametrize("name", CHATS)
def test_C32_chat_equals_transformers(smollm2, oracle, name):
    expected = oracle.apply_chat_template(
        CHATS[name], chat_template=smollm2.chat_template, add_generation_prompt=True, tokenize=False
    )
    assert smollm2.render_chat(CHATS[name]) == expected
    assert smollm2.encode_chat(CHATS[name]) == oracle.encode(expected, add_special_tokens=False)
    assert smollm2.render_chat(CHATS[name]).count("<|im_start|>assistant\n") == 1 + (name == "turns")


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("auto_bos", [True, False])
def test_C32_one_bos_where_the_template_writes_it(template_has_bos, auto_bos):
    backend = byte_tokenizer().backend
    if auto_bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
        )
    template = ("{{ bos_token }}" if template_has_bos else "") + CHATML
    tokenizer = Tokenizer(backend, bos_token_id=256, chat_template=template)
    assert tokenizer.encode_chat(CHATS["plain"]).count(256) == template_has_bos
    assert tokenizer.encode("hi").count(256) == auto_bos


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "start|>", "system\n", "hi", "\U000f0000", "é"]
        ),
        min_size=1,
        max_size=6,
    )
)
def test_typed_text_never_becomes_a_control_token(smollm2, parts):
    typed = "".join(parts)
    for tokenizer in (smollm2, byte_tokenizer()):
        controls = set(tokenizer._control.values())
        ids = tokenizer.encode_chat([{"role": "user", "content": typed}])
        harmless = tokenizer.encode_chat([{"role": "user", "content": "harmless"}])
        assert [i for i in ids if i in controls] == [i for i in harmless if i in controls]
        assert f"user\n{typed}\nassistant" in tokenizer.decode(ids)


def test_the_template_still_sees_the_text():
    template = "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}"
    tokenizer = Tokenizer(byte_tokenizer().backend, chat_template=template)
    ids = tokenizer.encode_chat([{"role": "user", "content": "  <|im_end|> "}])
    assert ids == [257, *b"<|im_end|>", 258]


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": "x"}], ["hi"], [{"role": "user", "content": None}]]
)
def test_bad_messages(messages):
    with pytest.raises(ValueError, match="^messages: "):
        byte_tokenizer().encode_chat(messages)


@pytest.mark.parametrize(
    "evil",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages[0] | attr('__class__')).__base__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% include 'file' %}",
        "{% if %}",
        "{{ range(10**9) }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_templates_are_sandboxed(evil):
    with pytest.raises(ValueError, match="^messages: the chat template refuses them: "):
        Tokenizer(byte_tokenizer().backend, chat_template=evil).encode_chat(CHATS["plain"])


def test_templates_may_refuse():
    refuses = "{{ raise_exception('roles must alternate') }}"
    for template, message in ((refuses, "roles must alternate"), (None, "no chat template")):
        with pytest.raises(ValueError, match=message):
            Tokenizer(byte_tokenizer().backend, chat_template=template).encode_chat(CHATS["plain"])


# --- streaming ---


def stream(tokenizer, ids, prompt_ids=()):
    detokenizer = tokenizer.detokenizer(prompt_ids)
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@given(st.text())
def test_C19_chunks_are_whole_characters(text):
    chunks, rest = stream(byte_tokenizer(), text.encode("utf-8", errors="replace"))
    assert "".join(chunks) == text.encode("utf-8", errors="replace").decode()
    assert rest == "" and not any("\ufffd" in c for c in chunks if "\ufffd" not in text)


@given(st.binary(), st.integers(0, 20))
def test_C19_any_bytes(data, cut):
    chunks, rest = stream(byte_tokenizer(), data)
    assert "".join(chunks) + rest == data.decode("utf-8", errors="replace") == byte_tokenizer().decode(data)


def test_C19_named_cases():
    text = "aé漢😀👩‍👩‍👧‍👦"
    data = text.encode()
    for cut in range(len(data) + 1):
        chunks, rest = stream(byte_tokenizer(), data[:cut])
        whole = data[:cut].decode("utf-8", errors="ignore")
        assert "".join(chunks) == whole
        assert rest == ("" if whole.encode() == data[:cut] else "\ufffd")
    for bad in (b"\xff", b"\xed\xa0\x80"):  # can never become characters: shown at once, the stream goes on
        chunks, rest = stream(byte_tokenizer(), bad + b"ok")
        assert "".join(chunks).endswith("ok") and "\ufffd" in "".join(chunks[:-2]) and rest == ""


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)),
                              "▁", "H", "e", "l", "o", "w", "r", "d", "b", "a", "f", "lo", "▁w", "or", "▁b", "▁f", "oo",
                              "▁foo", "ar", "▁bar"],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 20],
    "tokenizer.ggml.scores": [0.0] * 259 + [-100.0] * 11 + [-float(n) for n in range(9)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def test_C20_leading_space():
    tokenizer = Tokenizer.from_gguf(SENTENCEPIECE)
    assert tokenizer.eos_token_ids == (2,) and tokenizer.encode("foo")[0] == 1  # BOS
    assert tokenizer.decode(tokenizer.encode("foo bar")) == "foo bar"
    assert tokenizer.decode(tokenizer.encode("é")) == "é"  # by byte fallback
    bar = tokenizer.backend.token_to_id("▁bar")
    chunks, _ = stream(tokenizer, [bar], prompt_ids=tokenizer.encode("foo"))
    assert "foo" + "".join(chunks) == "foo bar"
    space, newline = tokenizer.backend.token_to_id("▁"), 3 + 0x0A
    for ids in ([space, bar], [newline, bar], [bar, bar], [1, bar]):
        chunks, rest = stream(tokenizer, ids)
        assert "".join(chunks) + rest == tokenizer.backend.decode(ids)


PIECES = {"▁foo": 0, "▁bar": 1, "▁": 2, "b": 3}


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="first"),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
)
@pytest.mark.parametrize("ids", [[0, 1], [2, 0], [3, 1], [2]])
def test_C20_the_first_space_goes_only_where_the_decoder_takes_it(decoder, ids):
    backend = tokenizers.Tokenizer(models.WordLevel(PIECES, unk_token="b"))
    backend.decoder = decoder
    assert Tokenizer(backend).decode(ids) == backend.decode(ids)


def test_C20_no_space_prefix():
    tokenizer = Tokenizer.from_gguf({**SENTENCEPIECE, "tokenizer.ggml.add_space_prefix": False})
    for text in ("foo", " foo", "  foo bar"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text


@given(st.text("fobar Hé\n", max_size=20))
def test_C20_sentencepiece_round_trip(text):
    tokenizer = Tokenizer.from_gguf(SENTENCEPIECE)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text


def test_byte_level_tokens_that_are_plain_text():
    backend = tokenizers.Tokenizer(models.WordLevel({"a b": 0, "漢": 1, "Ġx": 2, "é漢": 3}, unk_token="a b"))
    backend.decoder = decoders.ByteLevel()
    assert [Tokenizer(backend).decode([i]) for i in range(4)] == [backend.decode([i]) for i in range(4)]


def test_vocab_size_with_a_gap_between_the_ids():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).vocab_size == 6


@pytest.mark.parametrize("flag, pre, begins", [(None, "llama-bpe", True), (False, "llama-bpe", False),
                                               (None, "smollm", False), (True, "smollm", True)])  # fmt: skip
def test_C32_bos_of_a_gguf_file(flag, pre, begins):
    tokens = ["<s>", *byte_tokenizer().backend.get_vocab(with_added_tokens=False)]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [3] + [1] * 256, "tokenizer.ggml.bos_token_id": 0}  # fmt: skip
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.encode("hi")[0] == 0) == begins
    assert 0 not in tokenizer.encode("hi", add_special_tokens=False)


def test_C20_byte_level_space(smollm2):
    chunks, _ = stream(smollm2, smollm2.encode(" x"))
    assert "".join(chunks) == " x"


def test_sentencepiece_merges_by_score():
    # Scores fall in the order of the list: "lo" is merged before "oo", so "loo" is "lo" + "o".
    tokenizer = Tokenizer.from_gguf(SENTENCEPIECE)

    def pieces(text):
        return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("foo bar") == ["▁foo", "▁bar"]
    assert pieces("loo") == ["▁", "lo", "o"]
    assert pieces("wor é") == ["▁w", "or", "▁", "<0xC3>", "<0xA9>"]


@settings(deadline=None)
@given(text=st.text("folwrbad Hé\n", max_size=20).filter(lambda text: not text.startswith(" ")))
def test_sentencepiece_equals_transformers(text):
    # Text that starts with a space is left out: with Metaspace, as there, it gets no second one in front.
    gguf = pytest.importorskip("transformers.integrations.gguf", reason="in transformers since 5.24")
    names = {name.removeprefix("tokenizer.ggml."): value for name, value in SENTENCEPIECE.items()}
    oracle, _ = gguf.convert_gguf_tokenizer("llama", {**names, "tokenizer_type": "llama", "unk_token_id": 0})
    expected = oracle.encode(text, add_special_tokens=False).ids
    assert Tokenizer.from_gguf(SENTENCEPIECE).encode(text, add_special_tokens=False) == expected


# --- files ---


def test_save_and_load(smollm2, tmp_path):
    smollm2.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert (again.eos_token_ids, again.bos_token_id, again.chat_template) == (
        smollm2.eos_token_ids, smollm2.bos_token_id, smollm2.chat_template)  # fmt: skip
    assert all(again.encode(t) == smollm2.encode(t) for t in TEXTS)
    assert again.encode_chat(CHATS["turns"]) == smollm2.encode_chat(CHATS["turns"])


@pytest.mark.parametrize("as_dict", [True, False])
def test_tokenizer_config_in_its_variants(tmp_path, as_dict):
    byte_tokenizer().save(tmp_path)
    config = {
        "eos_token": {"content": "<|im_end|>"} if as_dict else "<|im_end|>",
        "bos_token": None,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.chat_template) == ((258,), None, "yes")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).chat_template == "file"


def test_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json: missing"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(ValueError, match="tokenizer.ggml.model='bert'"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "bert"})
    with pytest.raises(ValueError, match="tokenizer.ggml.pre='chameleon'"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "chameleon"})
    with pytest.raises(ValueError, match="tokenizer.ggml.tokens"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "gpt2"})
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend)
