"""SparseGPT's solve (Hessian given), ours against the published algorithm in torch, in turns on the same CPU.

    cargo build --release -p twofour --example solvers
    python bench/peers/sparsegpt.py target/release/examples/solvers [--rows 4096 --cols 4096 --rounds 5 --threads 2]

The contender follows the published implementation step for step: Cholesky factorization, inverse, upper Cholesky factor
of the inverse; blocks of 128 columns, in each a loop over columns with rank-one updates, 2:4 masks by topk, and one
GEMM for the columns after the block. All in f32.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import time

parser = argparse.ArgumentParser()
parser.add_argument("solvers")
parser.add_argument("--rows", type=int, default=4096)
parser.add_argument("--cols", type=int, default=4096)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
options = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = str(options.threads)

import torch  # noqa: E402

torch.set_num_threads(options.threads)


@torch.no_grad()
def published(w, h, block=128, damping=0.01):
    w, h = w.clone(), h.clone()
    rows, cols = w.shape
    dead = torch.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    diagonal = torch.arange(cols)
    h[diagonal, diagonal] += damping * torch.mean(torch.diag(h))
    h = torch.linalg.cholesky(h)
    h = torch.cholesky_inverse(h)
    u = torch.linalg.cholesky(h, upper=True)
    for start in range(0, cols, block):
        end = min(start + block, cols)
        now, u_now = w[:, start:end].clone(), u[start:end, start:end]
        out, errors = torch.zeros_like(now), torch.zeros_like(now)
        pruned = torch.zeros_like(now, dtype=torch.bool)
        for i in range(end - start):
            column, d = now[:, i], u_now[i, i]
            if i % 4 == 0:
                score = now[:, i : i + 4] ** 2 / torch.diag(u_now)[i : i + 4].reshape(1, -1) ** 2
                pruned.scatter_(1, i + torch.topk(score, 2, dim=1, largest=False)[1], True)
            kept = column.clone()
            kept[pruned[:, i]] = 0
            out[:, i] = kept
            error = (column - kept) / d
            now[:, i:] -= error.unsqueeze(1).matmul(u_now[i, i:].unsqueeze(0))
            errors[:, i] = error
        w[:, start:end] = out
        w[:, end:] -= errors.matmul(u[start:end, end:])
    return w


generator = torch.Generator().manual_seed(7)
w = torch.randn(options.rows, options.cols, generator=generator) * 0.02
x = torch.randn(512, options.cols, generator=generator) * torch.randn(options.cols, generator=generator).exp()
h = x.T @ x
command = [options.solvers, str(options.rows), str(options.cols), "512", "1"]
times = {"torch": [], "sparsegpt": [], "sparsegpt-f64": []}
# Processor seconds of both threads, for machines that others use too. Ours include making the problem.
processor = {name: [] for name in times}


def children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


for round in range(options.rounds):
    names = list(times)
    for name in names[round % 3 :] + names[: round % 3]:
        if name == "torch":
            start, busy = time.perf_counter(), time.process_time()
            published(w, h)
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
        else:
            busy = children()
            ran = subprocess.run([*command, name], check=True, capture_output=True, text=True)
            seconds, busy = float(ran.stdout.split()[1]), children() - busy
        times[name].append(seconds)
        processor[name].append(busy)
medians = {name: statistics.median(seconds) for name, seconds in times.items()}
print(
    json.dumps(
        {
            "rows": options.rows,
            "cols": options.cols,
            "threads": options.threads,
            "torch": torch.__version__,
            "seconds": times,
            "processor_seconds": processor,
            "median": medians,
        }
    )
)
for name in ("sparsegpt", "sparsegpt-f64"):
    ratios = [a / b for a, b in zip(times["torch"], times[name])]
    print(
        f"{name}: {medians[name]:.2f} s, torch {medians['torch']:.2f} s, {statistics.median(ratios):.2f}x (rounds"
        f" {min(ratios):.2f} to {max(ratios):.2f})"
    )
    busy = [a / b for a, b in zip(processor["torch"], processor[name])]
    print(f"    processor seconds: {statistics.median(busy):.2f}x (rounds {min(busy):.2f} to {max(busy):.2f})")
