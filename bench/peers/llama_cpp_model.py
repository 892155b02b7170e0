"""Writes a GGUF model with random weights for `llama_cpp.mjs`: `python3 bench/peers/llama_cpp_model.py SHAPE TYPE FILE
[--layers N] [--vocabulary N]`.

SHAPE is a name that `twofour-bench generate --model` takes; TYPE is bf16, q8_0 or q4_0, of every matrix, embedding and
head included. Needs `pip install gguf numpy`.
"""

import argparse
import functools

import gguf
import numpy as np
from gguf.quants import quantize

# Vocabulary, context, layers, width, heads, key-value heads, feed-forward width, base of rotation, whether the head is
# the embedding.
SHAPES = {
    "llama-3.2-1b": (128256, 131072, 16, 2048, 32, 8, 8192, 5e5, True),
    "llama-3.2-3b": (128256, 131072, 28, 3072, 24, 8, 8192, 5e5, True),
    "llama-3-8b": (128256, 8192, 32, 4096, 32, 8, 14336, 5e5, False),
    "llama-2-7b": (32000, 4096, 32, 4096, 32, 32, 11008, 1e4, False),
}
TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def tokens(vocabulary):
    """A vocabulary that the reader accepts: control tokens, bytes, and words that nobody writes."""
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [f"t{index}" for index in range(vocabulary - len(names))]
    return names, [2, 3, 3] + [6] * 256 + [1] * (vocabulary - 259)


def write(shape, kind, path, layers, vocabulary):
    its_vocabulary, context, its_layers, width, heads, kv_heads, feed_forward, base, tied = SHAPES[shape]
    vocabulary, layers = vocabulary or its_vocabulary, layers or its_layers
    head_dim = width // heads
    matrix_type, file_type = TYPES[kind]
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    writer.add_name(f"{shape}, {layers} layers, random")
    writer.add_file_type(file_type)
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(base)
    writer.add_vocab_size(vocabulary)
    names, types = tokens(vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    @functools.cache
    def numbers(rows, cols):
        # A few thousand random rows, repeated, and the same in all layers: what is multiplied does not change how long
        # it takes.
        values = random.standard_normal((min(rows, 2048), cols), dtype=np.float32) * np.float32(0.02)
        stored = quantize(values, matrix_type)
        return np.concatenate([stored] * (rows // len(stored)) + [stored[: rows % len(stored)]])

    def matrix(name, rows, cols):
        writer.add_tensor(name, numbers(rows, cols), raw_dtype=matrix_type)

    def gain(name):
        writer.add_tensor(name, np.ones(width, dtype=np.float32))

    matrix("token_embd.weight", vocabulary, width)
    if not tied:
        matrix("output.weight", vocabulary, width)
    gain("output_norm.weight")
    for layer in range(layers):
        part = f"blk.{layer}."
        gain(part + "attn_norm.weight")
        gain(part + "ffn_norm.weight")
        matrix(part + "attn_q.weight", heads * head_dim, width)
        matrix(part + "attn_k.weight", kv_heads * head_dim, width)
        matrix(part + "attn_v.weight", kv_heads * head_dim, width)
        matrix(part + "attn_output.weight", width, heads * head_dim)
        matrix(part + "ffn_gate.weight", feed_forward, width)
        matrix(part + "ffn_up.weight", feed_forward, width)
        matrix(part + "ffn_down.weight", width, feed_forward)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("file")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocabulary", type=int)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.type, arguments.file, arguments.layers, arguments.vocabulary)
