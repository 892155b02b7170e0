"""Makes the fuzzers' first inputs: `python3 seeds/make.py`, with no package but the standard library."""

import gzip
import io
import json
import pathlib
import struct
import zipfile

HERE = pathlib.Path(__file__).parent


def safetensors(tensors, metadata):
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def manifest(dtype, shape, version=1, **fields):
    weight = {"shape": shape, "dtype": dtype, "pattern": "2:4", **fields}
    return {"twofour": json.dumps({"version": version, "weights": {"w": weight}})}


def pytorch(tensors):
    """A file of torch.save: tensors are name, storage type, bytes, offset, shape and strides."""
    text = lambda value: b"X" + struct.pack("<I", len(value)) + value.encode()
    sizes = lambda values: b"(" + b"".join(b"K" + bytes([value]) for value in values) + b"t"
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        pickle = b"\x80\x02}("
        for place, (name, kind, data, offset, shape, strides) in enumerate(tensors):
            storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(str(place)) + text("cpu") + b"K\x01tQ"
            empty = b"ccollections\nOrderedDict\n)R"
            pickle += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage
            pickle += b"K" + bytes([offset]) + sizes(shape) + sizes(strides) + b"\x89" + empty + b"tR"
            archive.writestr(f"a/data/{place}", data)
        archive.writestr("a/data.pkl", pickle + b"u.")
        archive.writestr("a/byteorder", "little")
    return found.getvalue()


def npz(arrays):
    """A file of numpy.savez_compressed: arrays are name, dtype, shape and bytes."""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, dtype, shape, content in arrays:
            text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), header + content, zipfile.ZIP_DEFLATED)
    return found.getvalue()


def gguf_text(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(entries, tensors):
    """A GGUF file without its first four bytes: entries are numbers, texts and lists of texts, tensors (name, sizes, encoding, content)."""
    found = struct.pack("<IQQ", 3, len(tensors), len(entries))
    for key, value in entries.items():
        found += gguf_text(key)
        if isinstance(value, str):
            found += struct.pack("<I", 8) + gguf_text(value)
        elif isinstance(value, list):
            kinds = {str: 8, int: 5, float: 6}
            found += struct.pack("<IIQ", 9, kinds[type(value[0])], len(value))
            found += b"".join(gguf_text(v) if isinstance(v, str) else struct.pack("<i" if isinstance(v, int) else "<f", v) for v in value)
        else:
            found += struct.pack("<II", 4, value)
    data = b""
    for name, sizes, encoding, content in tensors:
        found += gguf_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, encoding, len(data))
        data += content + bytes(-len(content) % 32)
    return found + bytes(-(len(found) + 4) % 32) + data


def gguf_sizes(architecture):
    sizes = {"context_length": 8, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "attention.head_count": 2, "attention.sliding_window": 4}
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in sizes.items()}}


# The metadata of a model, and of a checkpoint of the trainer in the fuzz target.
SIZES = b'{"layers":1,"width":8,"heads":1,"context":4,"feed_forward":8}'
STATE = b'{"model":' + SIZES + b',"training":{},"step":1,"corpus":0,"sparse_layers":[]}'

RECIPE = b"""[model]
layers = 1
width = 8
heads = 1
context = 4
[data]
text = ["a.txt"]
[training]
steps = 10
warm_up = 2
[sparsity]
method = "%s"
"""

RECIPE_OF_IMAGES = b"""[model]
kind = "vit"
layers = 1
width = 8
heads = 1
image = 8
patch = 4
classes = 3
pooling = "mean"
[data]
images = "images"
labels = "labels.gz"
[training]
steps = 10
warm_up = 2
linear_probe = true
[sparsity]
method = "ste"
"""


def idx(sizes, values):
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + bytes(values)


SEEDS = {
    # The target puts the mark in front.
    "pytorch/plain": pytorch(
        [("w", "FloatStorage", bytes(32), 0, [2, 4], [4, 1]), ("b", "BFloat16Storage", bytes(6), 1, [2], [1])]
    )[4:],
    "pytorch/strided": pytorch(
        [("w", "HalfStorage", bytes(range(24)), 0, [4, 3], [1, 4]), ("e", "CharStorage", bytes(1), 0, [3, 2], [0, 0])]
    )[4:],
    "pytorch/npz": npz([("w.mask", "|u1", "(6,)", bytes(range(6))), ("b", "<f4", "(2, 1)", bytes(8))])[4:],
    "reader/empty": safetensors([], {}),
    "reader/plain": safetensors(
        [("a", "F32", [2, 2], bytes(16)), ("b", "I64", [], bytes(8)), ("c", "F4", [2], b"x"), ("z", "U8", [0, 3], b"")],
        {"format": "pt"},
    ),
    "reader/compressed": safetensors(
        [
            ("w.meta", "U32", [2, 1], struct.pack("<2I", 0x4D, 0x94)),
            ("w.values", "BF16", [2, 4], bytes(range(16))),
        ],
        manifest("BF16", [2, 7]),
    ),
    "reader/scaled": safetensors(
        [
            ("w.meta", "U32", [1, 1], struct.pack("<I", 0x4)),
            ("w.scales", "F32", [1], bytes(4)),
            ("w.values", "I8", [1, 2], b"\x01\xff"),
        ],
        manifest("I8", [1, 4]),
    ),
    "reader/int4": safetensors(
        [
            ("w.meta", "U32", [1, 2], struct.pack("<2I", 0x44444444, 0x4)),
            ("w.scales", "F16", [1, 1], struct.pack("<e", 0.5)),
            ("w.values", "U8", [1, 9], bytes(range(0x81, 0x8A))),
        ],
        manifest("I4", [1, 36], group_size=128),
    ),
    "reader/int4-rows": safetensors(
        [
            ("w.meta", "U32", [2, 1], struct.pack("<2I", 0x4, 0xE)),
            ("w.scales", "F16", [2, 1], struct.pack("<2e", 0.5, 2.0)),
            ("w.values", "U8", [2, 1], b"\x1f\x90"),
        ],
        manifest("I4", [2, 4]),
    ),
    "reader/int4-64": safetensors(
        [
            ("w.meta", "U32", [1, 3], struct.pack("<3I", 0x44444444, 0x99999999, 0xD)),
            ("w.scales", "F16", [1, 2], struct.pack("<2e", 0.5, 2.0)),
            ("w.values", "U8", [1, 17], bytes(range(0x81, 0x92))),
        ],
        manifest("I4", [1, 68], 2, group_size=64),
    ),
    "reader/int8-64": safetensors(
        [
            ("w.meta", "U32", [1, 3], struct.pack("<3I", 0x44444444, 0x99999999, 0xD)),
            ("w.scales", "F16", [1, 2], struct.pack("<2e", 0.5, 2.0)),
            ("w.values", "I8", [1, 34], bytes(range(100, 134))),
        ],
        manifest("I8", [1, 68], 2, group_size=64),
    ),
    "peer/bitmask": safetensors(
        [
            ("m.bitmask", "U8", [1, 1], b"\x59"),
            ("m.compressed", "BF16", [1, 4], struct.pack("<4H", 0x3F80, 0xBF80, 0, 0x8000)),
            ("m.shape", "I64", [2, 1], struct.pack("<2q", 1, 8)),
        ],
        {},
    ),
    "peer/fp8-bitmask": safetensors(
        [
            ("m.bitmask", "U8", [1, 1], b"\x59"),
            ("m.compressed", "F8_E4M3", [1, 4], b"\x38\xb8\x00\x80"),
            ("m.shape", "I64", [2, 1], struct.pack("<2q", 1, 8)),
            ("m.weight_scale", "BF16", [1, 1], struct.pack("<H", 0x3F00)),
        ],
        {},
    ),
    "peer/pack": safetensors(
        [
            ("m.weight_packed", "I32", [1, 2], struct.pack("<2I", 0x88178899, 0x8)),
            ("m.weight_scale", "F16", [1, 1], struct.pack("<e", 0.5)),
            ("m.weight_shape", "I64", [2], struct.pack("<2q", 1, 9)),
        ],
        {},
    ),
    "peer/int8": safetensors(
        [
            ("m.input_scale", "F32", [1], struct.pack("<f", 1.0)),
            ("m.weight", "I8", [2, 4], b"\x01\x00\xff\x00\x00\x80\x00\x7f"),
            ("m.weight_scale", "F32", [2, 1], struct.pack("<2f", 0.5, 2.0)),
        ],
        {},
    ),
    "peer/fp8": safetensors(
        [("m.weight", "F8_E4M3", [1, 4], b"\x38\x39\x3a\x3b"), ("m.weight_scale", "F32", [1], struct.pack("<f", 0.5))],
        {},
    ),
    "peer/marlin": safetensors(
        [
            ("m.meta", "I16", [1, 128], struct.pack("<128H", *[0x4E9D] * 128)),
            ("m.scale_packed", "F16", [1, 64], struct.pack("<64e", *[0.5] * 64)),
            ("m.weight_packed", "I32", [1, 128], bytes(range(256)) * 2),
        ],
        {},
    ),
    "peer/gptq": safetensors(
        [
            ("m.B_24", "I32", [1, 256], bytes(range(256)) * 4),
            ("m.B_meta", "I16", [1, 128], struct.pack("<128H", *[0x4E9D] * 128)),
            ("m.s", "F16", [1, 64], struct.pack("<64e", *[0.5] * 64)),
        ],
        {},
    ),
    "gguf/llama": gguf(
        gguf_sizes("llama")
        | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"], "tokenizer.ggml.token_type": [2, 1, 1, 1], "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0]},
        [("token_embd.weight", [32, 4], 2, bytes(72)), ("blk.0.attn_q.weight", [32, 4], 8, bytes(136)), ("blk.0.attn_norm.weight", [32], 0, bytes(128))],
    ),
    "gguf/gpt2": gguf(
        gguf_sizes("gpt2")
        | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 1},
        [("token_embd.weight", [32, 3], 1, bytes(192)), ("blk.0.ffn_up.weight", [32, 4], 7, bytes(96)), ("blk.0.ffn_up.bias", [4], 0, bytes(16))],
    ),
    "gguf/gemma3": gguf(gguf_sizes("gemma3"), [("token_embd.weight", [256, 1], 12, bytes(144)), ("output_norm.weight", [32], 0, bytes(128))]),
    "gguf/encodings": gguf(
        gguf_sizes("qwen2"),
        [(f"blk.{i}.ffn_up.weight", [256, 1], kind, bytes(size)) for i, (kind, size) in enumerate([(3, 160), (6, 176), (10, 84), (11, 110), (13, 176), (14, 210), (30, 512)])],
    ),
    "index/small": json.dumps(
        {
            "metadata": {"total_size": 24},
            "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
        }
    ).encode(),
    "pattern/two-four": b"2:4",
    "pattern/large": b"64:64",
    "compressed/f32": bytes([0, 1, 1, 8]) + struct.pack("<4f", 5, 6, 7, 0) + struct.pack("<I", 0x4D),
    "compressed/bf16-odd": bytes([1, 1, 2, 6]) + bytes(16) + struct.pack("<2I", 0x44, 0x44),
    "layout/sm80-16": bytes([0, 4, 1, 1]) + struct.pack("<64H", *[0x4444] * 64),
    "layout/sm80-8": bytes([1, 2, 1, 2]) + struct.pack("<32I", *[0xEEEEEEEE] * 32),
    "layout/sm90-16": bytes([2, 8, 1, 1]) + struct.pack("<128H", *[0x9999] * 128),
    "layout/sm90-8": bytes([3, 8, 1, 1]) + struct.pack("<64I", *[0xDDDDDDDD] * 64),
    "layout/bitmask": bytes([4, 1, 1, 1]) + bytes([0x33] * 32),
    "layout/lanes": bytes([5, 2, 1, 4]) + bytes(range(1, 255, 2)) * 4 + bytes([0x99] * 256) + struct.pack("<8I", *[0x3C003C00] * 8),
    "layout/large": bytes([2, 0]) + struct.pack("<2Q", 1 << 60, 64),
    "gpt/dense": bytes([0, 1]),
    "gpt/compressed": bytes([1, 1]),
    "gpt/sizes": bytes([0, 2]) + SIZES.replace(b'"', b'\\"'),
    "checkpoint/valid": bytes([1]),
    "checkpoint/state": bytes([2]) + STATE.replace(b'"', b'\\"'),
    "recipe/fst": RECIPE % b"fst" + b'layers = ["blocks.*.mlp.*", "head"]\nmask = "greedy"\n',
    "recipe/step": RECIPE % b"step" + b"mask = 'optimal'\n",
    "recipe/override": b"# training.schedule=wsd\n" + RECIPE % b"dense",
    "recipe/mistakes": b"# sparsity.nask={a=[1]}\n[model]\nlayers = -1\n[modle]\nx.y = 1979-05-27\n[data]\ntext = 0x5\n",
    "recipe/vit": RECIPE_OF_IMAGES,
    "idx/images": idx([2, 2, 3], range(12)),
    "idx/colors": idx([1, 1, 2, 3], range(6)),
    "idx/labels": idx([5], [0, 1, 2, 1, 0]),
    "idx/gzip": gzip.compress(idx([2, 2, 3], range(12)), mtime=0),
    "idx/truncated": idx([1 << 10, 1 << 10, 1 << 10], range(6)),
    "compressed/large": bytes([2, 0]) + struct.pack("<2Q", 1 << 60, 0),
}

for name, content in SEEDS.items():
    (HERE / name).parent.mkdir(exist_ok=True)
    (HERE / name).write_bytes(content)
