"""Time and memory of Wanda and SparseGPT at the layer shapes of LLaMA-7B: `python3 bench/studies/pruning_time.py
target/release/examples/solvers -o FILE`.

Runs `cargo build --release -p twofour --example solvers`' program once for each shape and method, for calibration of 16
x 512 tokens. A layer of Wanda is the norms of its inputs and the mask; a block of SparseGPT is the Hessians of its four
inputs and the solves of its seven layers. Processor seconds are those of both threads, with making the problem; peak
memory is the process's.
"""

import argparse
import json
import os
import platform
import subprocess

# [out, in], and how many of a block's layers have the shape; and the inputs of a block's layers, which share their
# statistics.
SHAPES = [([4096, 4096], 4), ([11008, 4096], 2), ([4096, 11008], 1)]
INPUTS = [(4096, 3), (11008, 1)]
TOKENS = 16 * 512


def cpu():
    with open("/proc/cpuinfo") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))


def run(program, rows, cols, method, rounds):
    read, write = os.pipe()
    process = subprocess.Popen([program, str(rows), str(cols), str(TOKENS), str(rounds), method], stdout=write)
    os.close(write)
    text = os.fdopen(read).read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0, text
    seconds = [float(line.split()[1]) for line in text.splitlines()]
    return {
        "method": method,
        "shape": [rows, cols],
        "seconds": seconds,
        "processor_seconds_of_all": usage.ru_utime + usage.ru_stime,
        "peak_memory_bytes": usage.ru_maxrss * 1024,
        "load_average": os.getloadavg()[0],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("solvers")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    rows = []
    for shape, _ in SHAPES:
        for method in ("norms", "wanda", "hessian", "sparsegpt"):
            rows.append(run(options.solvers, *shape, method, options.rounds))
            print(rows[-1], flush=True)
    best = {(row["method"], *row["shape"]): min(row["seconds"]) for row in rows}
    of_input = {shape[1]: shape for shape, _ in SHAPES}
    block = {
        name: (
            sum(best[statistic, *of_input[inputs]] * count for inputs, count in INPUTS)
            + sum(best[solve, *shape] * count for shape, count in SHAPES)
        )
        for name, statistic, solve in (("wanda", "norms", "wanda"), ("sparsegpt", "hessian", "sparsegpt"))
    }
    result = {
        "cpu": cpu(),
        "python": platform.python_version(),
        "threads": options.threads,
        "tokens": TOKENS,
        "rows": rows,
        "seconds_of_a_block": block,
    }
    with open(options.output, "w") as file:
        file.write(json.dumps(result, indent=2) + "\n")
    print(block)


if __name__ == "__main__":
    main()
