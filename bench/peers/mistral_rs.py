"""mistral.rs as a baseline of `twofour-bench generate --llama-cpp 'python3 bench/peers/mistral_rs.py MODEL.gguf
--threads 2'`.

Needs `pip install mistralrs==0.9.5 gguf`. Models: `llama_cpp_model.py`, by whose vocabulary the prompt is written. The
times are those of mistral.rs itself, in whole milliseconds.

The first line it prints names the program. For each line {"prompt": P, "length": N} on stdin it reads P tokens in an
empty context (prefill, until the first token is chosen), writes N more one by one (decode), and prints
{"prefill_s": ..., "decode_s": ...}.
"""

import argparse
import json
import os
import pathlib
import sys
from importlib import metadata

import gguf

# Names of tokens begin with number 259 of the vocabulary.
FIRST_NAME = 259
# mistral.rs puts a space before a text: three bytes, and a token for each.
SPACE = 3


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
    size = sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
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
