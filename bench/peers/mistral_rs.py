"""mistral.rs as a baseline of `twofour-bench generate --llama-cpp 'python3 bench/peers/mistral_rs.py MODEL.gguf
--threads 2'`.

Needs `pip install mistralrs==0.9.5`. Models: `llama_cpp_model.py`, by whose vocabulary the prompt is written. The
times are those of mistral.rs itself, in whole milliseconds.

The first line it prints names the program. For each line {"prompt": P, "length": N} on stdin it reads P tokens in an
empty context (prefill, until the first token is chosen), writes N more one by one (decode), and prints
{"prefill_s": ..., "decode_s": ...}.
"""

import argparse
import json
import os
import pathlib
import struct
import sys
from importlib import metadata

# Names of tokens begin with number 259 of the vocabulary.
FIRST_NAME = 259
# mistral.rs puts a space before a text: three bytes, and a token for each.
SPACE = 3


def weight_bytes(path):
    """Bytes of a file's tensors: what follows the header of GGUF."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    string, array, alignment = 8, 9, 32
    with open(path, "rb") as file:

        def number(kind):
            return struct.unpack("<" + kind, file.read(struct.calcsize(kind)))[0]

        def skip(kind, count=1):
            if kind in sizes:
                file.seek(sizes[kind] * count, os.SEEK_CUR)
                return
            for _ in range(count):
                if kind == string:
                    file.seek(number("Q"), os.SEEK_CUR)
                elif kind == array:
                    skip(number("I"), number("Q"))

        file.seek(8)
        tensors, pairs = number("Q"), number("Q")
        for _ in range(pairs):
            skip(string)
            skip(number("I"))
        for _ in range(tensors):
            skip(string)
            # Dimensions, type and place.
            file.seek(8 * number("I") + 12, os.SEEK_CUR)
        header = -(-file.tell() // alignment) * alignment
        return os.path.getsize(path) - header


def text(tokens):
    """A text of so many tokens."""
    numbers = (300 + (index * 7) % 20000 for index in range(tokens - SPACE))
    return "".join(f"t{number - FIRST_NAME}" for number in numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    file = arguments.file.resolve()
    size = weight_bytes(file)
    # Read when the library is loaded.
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("RUST_LOG", "error")
    from mistralrs import CompletionRequest, Runner, Which

    model = Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name)
    runner = Runner(which=model, max_seqs=1, prefix_cache_n=0, token_source="none")
    introduction = {
        "contender": f"mistral.rs {file.stem.rpartition('-')[2].upper()}",
        "version": f"mistral.rs {metadata.version('mistralrs')}",
        "weight_bytes": size,
    }
    print(json.dumps(introduction), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        prompt, length = task["prompt"], task["length"]
        request = CompletionRequest(
            prompt=text(prompt), model="default", max_tokens=length + 1, temperature=0.0, ignore_eos=True
        )
        usage = runner.send_completion_request(request).usage
        if (usage.prompt_tokens, usage.completion_tokens) != (prompt, length + 1):
            found = f"{usage.prompt_tokens} tokens read, {usage.completion_tokens} written"
            sys.exit(f"{found}, for {prompt} and {length + 1}")
        times = {"prefill_s": usage.total_prompt_time_sec, "decode_s": usage.total_completion_time_sec}
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
