"""GGUF files as llama.cpp's converter writes them, made in a test: by hand, value by value."""

import struct
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel

SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, F32, BOOL, TEXT, ARRAY = 4, 6, 7, 8, 9
F32_TENSOR = 0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ 1", "1 2", "Ġ t", "h e", "Ġt he"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def text(value):
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def scalar(kind, value):
    return text(value) if kind == TEXT else struct.pack(f"<{SCALAR_CODES[kind]}", value)


def entry(key, kind, value, of=None):
    if kind == ARRAY:
        content = struct.pack("<IQ", of, len(value)) + b"".join(scalar(of, item) for item in value)
    else:
        content = scalar(kind, value)
    return text(key) + struct.pack("<I", kind) + content


def gguf_bytes(entries, tensors, version=3, alignment=32):
    """`entries`: as `entry` takes them; `tensors`: name -> (shape as torch has it, type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    head += b"".join(entry(*each) for each in entries)
    offset, body = 0, b""
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        body += content + bytes(-len(content) % alignment)
        offset = len(body)
    return head + bytes(-len(head) % alignment) + body


def interleaved(weight, num_heads):
    """Row 2 i + j of a head is what was its row j * half + i."""
    half = weight.shape[0] // num_heads // 2
    order = [h * 2 * half + j * half + i for h in range(num_heads) for i in range(half) for j in range(2)]
    return weight[order]


_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    name, kind = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
    if name in _NAMES:
        return f"{_NAMES[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def llama_entries(config, pre="smollm", family="llama"):
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    if family == "qwen3moe":
        numbers |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return [
        ("general.architecture", TEXT, family),
        *((f"{family}.{key}", U32, value) for key, value in numbers.items()),
        (f"{family}.rope.freq_base", F32, 100_000.0),
        (f"{family}.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("tokenizer.ggml.model", TEXT, "gpt2"),
        ("tokenizer.ggml.pre", TEXT, pre),
        ("tokenizer.ggml.tokens", ARRAY, TOKENS, TEXT),
        ("tokenizer.ggml.token_type", ARRAY, [3 if t in SPECIAL else 1 for t in TOKENS], 5),
        ("tokenizer.ggml.merges", ARRAY, MERGES, TEXT),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.padding_token_id", U32, 2),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", TEXT, TEMPLATE),
    ]


def write_llama(path: Path, model, entries=None, extra=(), family="llama"):
    """A transformers model as a GGUF in float32; Q and K of a Llama lie otherwise there."""
    heads = {
        "q_proj": model.config.num_attention_heads,
        "k_proj": model.config.num_key_value_heads,
    }
    tensors = {}

    def add(name, weight):
        tensors[gguf_name(name)] = (
            tuple(weight.shape),
            F32_TENSOR,
            weight.contiguous().to(torch.float32).numpy().tobytes(),
        )

    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, rows in zip(("gate", "up"), weight.chunk(2, 1), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = (
                    tuple(rows.shape),
                    F32_TENSOR,
                    rows.contiguous().numpy().tobytes(),
                )
            continue
        part = name.split(".")[-2]
        add(name, interleaved(weight, heads[part]) if part in heads and family == "llama" else weight)
    tensors.update(extra)
    written = llama_entries(model.config, family=family) if entries is None else entries
    path.write_bytes(gguf_bytes(written, tensors))
