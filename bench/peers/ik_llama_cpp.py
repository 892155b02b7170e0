"""ik_llama.cpp as a baseline of `twofour-bench generate --llama-cpp 'python3 bench/peers/ik_llama_cpp.py MODEL.gguf
--threads 2'`.

Needs numpy and `pip install ik-llama-cpp-python==0.1.5`, whose wheel for x86-64 is compiled for AVX2. Nothing in the
wheel is bound to a version of Python: unpacked, in a folder that PYTHONPATH names, it serves any. Models:
`llama_cpp_model.py`.

The first line it prints names the program. For each line {"prompt": P, "length": N} on stdin it reads P tokens in an
empty context (prefill, until the first token is chosen), writes N more one by one (decode), and prints
{"prefill_s": ..., "decode_s": ...}.
"""

import argparse
import ctypes
import json
import pathlib
import sys
import time
from importlib import metadata

import numpy as np

# This file has the package's name.
sys.path = [folder for folder in sys.path if pathlib.Path(folder).resolve() != pathlib.Path(__file__).resolve().parent]
from ik_llama_cpp import _ctypes_api as api  # noqa: E402

# Tokens that are read at a time.
BATCH = 512


class Model:
    """A model in memory with one context, on the CPU."""

    def __init__(self, path, threads, context, repack):
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.repack_tensors = repack
        params.use_mmap = not repack
        self.model = api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            sys.exit(f"{path}: not loaded")
        params = api.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"{path}: no context of {context} tokens")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(BATCH, 0, 1)

    def weight_bytes(self):
        library = api._lib
        library.llama_model_size.argtypes, library.llama_model_size.restype = [ctypes.c_void_p], ctypes.c_uint64
        library.llama_get_model_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        library.llama_get_model_tensor.restype = ctypes.c_void_p
        library.ggml_nbytes.argtypes, library.ggml_nbytes.restype = [ctypes.c_void_p], ctypes.c_size_t
        size = library.llama_model_size(self.model)
        if not library.llama_get_model_tensor(self.model, b"output.weight"):
            # The embedding is the head, too, and was counted twice.
            size -= library.ggml_nbytes(library.llama_get_model_tensor(self.model, b"token_embd.weight"))
        return size

    def read(self, tokens, position):
        """Reads tokens, the first of them at a position, and returns the likeliest next one."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            batch = self.batch
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = position + start + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = start + index == len(tokens) - 1
            if error := api.llama_decode(self.context, batch):
                sys.exit(f"llama_decode of {len(part)} tokens at {position + start}: error {error}")
        logits = api.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def run(self, prompt, length):
        api.llama_kv_cache_clear(self.context)
        tokens = [300 + (index * 7) % 20000 for index in range(prompt)]
        begun = time.perf_counter()
        token = self.read(tokens, 0)
        first = time.perf_counter()
        for position in range(prompt, prompt + length):
            token = self.read([token], position)
        return {"prefill_s": first - begun, "decode_s": time.perf_counter() - first}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repack", action="store_true", help="interleave rows while loading, llama.cpp's -rtr")
    arguments = parser.parse_args()
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    api._lib.llama_log_set(silent, None)
    model = Model(arguments.file, arguments.threads, arguments.context, arguments.repack)
    kind = pathlib.Path(arguments.file).stem.rpartition("-")[2].upper()
    introduction = {
        "contender": f"ik_llama.cpp {kind}" + (" repacked" if arguments.repack else ""),
        "version": f"ik_llama.cpp by ik-llama-cpp-python {metadata.version('ik-llama-cpp-python')}",
        "weight_bytes": model.weight_bytes(),
    }
    print(json.dumps(introduction), flush=True)
    for line in sys.stdin:
        print(json.dumps(model.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
