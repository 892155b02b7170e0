"""Makes the fuzzers' first inputs: `python3 seeds/make.py`, with no package but the standard library."""

import json
import pathlib
import struct

HERE = pathlib.Path(__file__).parent


def safetensors(tensors, metadata):
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def manifest(dtype, shape):
    return {"twofour": json.dumps({"version": 1, "weights": {"w": {"shape": shape, "dtype": dtype, "pattern": "2:4"}}})}


SEEDS = {
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
    "compressed/large": bytes([2, 0]) + struct.pack("<2Q", 1 << 60, 0),
}

for name, content in SEEDS.items():
    (HERE / name).write_bytes(content)
