#!/usr/bin/env bash
# Tokens a second of data parallel training, on one GPU and on two: a GPT of 774 M parameters (36 layers of width 1280,
# 20 heads, context 1024), 8 sequences a GPU, 14 steps of which the last 10 count (their median). Prints one JSON object
# for each run, and the ratio.
#
#   bench/remote/two_gpus.sh TWOFOUR FOLDER [METHOD [MASK]]
#
# TWOFOUR is the command; FOLDER is where runs are kept, with 1 MB each: they are killed after 14 steps, before a
# checkpoint. METHOD is that of a recipe, `dense` if none is given, MASK its mask. DEVICES="0 0,1 0,1,2,3" chooses other
# GPUs. NCCL_DEBUG=INFO shows what NCCL does.
set -euo pipefail
twofour=$(realpath "${1:?usage: bench/remote/two_gpus.sh TWOFOUR FOLDER [METHOD [MASK]]}")
folder=${2:?usage: bench/remote/two_gpus.sh TWOFOUR FOLDER [METHOD [MASK]]}
method=${3:-dense}
mask=${4:-}
steps=14
counted=10
mkdir -p "$folder"
folder=$(realpath "$folder")
cd "$(dirname "$0")/../.."

for devices in ${DEVICES:-0 0,1}; do
    count=$(tr ',' '\n' <<<"$devices" | wc -l)
    run=$folder/$method${mask:+-$mask}-$count
    rm -rf "$run"
    set -- train recipes/dense.toml -o "$run" --device "cuda:$devices" \
        --set model.layers=36 --set model.width=1280 --set model.heads=20 --set model.context=1024 \
        --set training.batch=$((8 * count)) --set training.steps=1000 \
        --set training.learning_rate=1e-4 --set training.final_learning_rate=1e-5 \
        --set training.validate_every=0 --set training.checkpoint_every=0
    [ "$method" = dense ] || set -- "$@" --set "sparsity.method=$method"
    [ -z "$mask" ] || set -- "$@" --set "sparsity.mask=$mask"
    "$twofour" "$@" >"$folder/log-$count" 2>&1 &
    process=$!
    # Nothing is to be saved: the run is ended between two steps or in one.
    while kill -0 "$process" 2>/dev/null; do
        lines=0
        [ ! -f "$run/metrics.jsonl" ] || lines=$(wc -l <"$run/metrics.jsonl")
        [ "$lines" -lt "$steps" ] || kill -KILL "$process" 2>/dev/null || true
        sleep 0.2
    done
    wait "$process" 2>/dev/null || true
    [ -f "$run/metrics.jsonl" ] || { cat "$folder/log-$count" >&2; exit 1; }
done

python3 - "$folder" "$method${mask:+-$mask}" "$steps" "$counted" ${DEVICES:-0 0,1} <<'PYTHON'
import json, statistics, sys

folder, name, steps, counted, *devices = sys.argv[1:]
speeds = []
for names in devices:
    count = len(names.split(","))
    with open(f"{folder}/{name}-{count}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file.read().splitlines()[: int(steps)]]
    if len(lines) < int(steps):
        sys.exit(f"{len(lines)} steps on {names}, {steps} are needed: see {folder}/log-{count}")
    speed = statistics.median(line["tokens_per_s"] for line in lines[-int(counted) :])
    speeds.append((count, speed))
    loss = [lines[0]["loss"], lines[-1]["loss"]]
    print(json.dumps({"method": name, "gpus": count, "tokens_per_s": round(speed), "loss": loss}))
(first, base), *others = speeds
for count, speed in others:
    print(json.dumps({"method": name, "gpus": [first, count], "ratio": round(speed / base, 3)}))
PYTHON
