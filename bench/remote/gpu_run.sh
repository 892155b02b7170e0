#!/bin/sh
# Checks and times everything on the GPU of this machine. `bench/remote/gpu_pack.sh` copies this beside what it runs.
#
#   FOLDER/run OUT [tests] [sanitizers] [suites] [step] [encoder] [grid] [epilogues] [python]
#
# Without a name: tests, sanitizers and suites.
#
# step is whole training steps of ViT-L and of GPT-2 774M, encoder SAM's image encoders with random weights. A run may
# take TWOFOUR_LIMIT seconds. grid measures for TWOFOUR_LIMIT seconds (300 unless told) and continues OUT/grid.json, or
# FOLDER/grid.json where OUT has none.
#
# Logs and each suite's JSON go to OUT, a line for each run to stdout. TWOFOUR_CUSPARSELT and TWOFOUR_CUBLASLT name the
# folders of the libraries where they are not found otherwise; compute-sanitizer is looked for on the path and in
# /usr/local/cuda/bin.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: run OUT [tests] [sanitizers] [suites] [step] [encoder] [grid] [epilogues] [python]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
parts=${*:-tests sanitizers suites}
# A test that finds no GPU fails.
export TWOFOUR_CACHE="$here/cache" TWOFOUR_CHECKPOINTS="$here/checkpoints" TWOFOUR_REQUIRE_GPU=1 RUST_BACKTRACE=0
failed=0

# A run by its name: its log, its time, and what its log says of it. Tests of which none has the names that are asked
# for have failed.
try() {
    name=$1
    shift
    begun=$(date +%s)
    timeout "${TWOFOUR_LIMIT:-300}" "$@" >"$out/$name.log" 2>&1
    code=$?
    if [ $code -eq 0 ] && grep -qx 'running 0 tests' "$out/$name.log"; then
        echo 'no test has such a name' >>"$out/$name.log"
        code=1
    fi
    said=$(grep -E '^test result|SUMMARY|FAILED' "$out/$name.log" | sort -u | head -n 4 | tr '\n' ' ')
    echo "$name: $([ $code -eq 0 ] && echo ok || echo "exit code $code"), $(($(date +%s) - begun)) s. $said"
    [ $code -eq 0 ] || {
        tail -n 2 "$out/$name.log"
        failed=1
    }
}

tests() {
    for test in "$here"/test-*; do try "$(basename "$test")" "$test" --test-threads 16; done
}

# Every kernel of GEMM once under racecheck, each part of names with a limit of its own.
racecheck_gemm() {
    set -- "$sanitizer" --tool racecheck --error-exitcode 9 "$here/test-gemm" --test-threads 1
    for words in again endings graph long across; do try "racecheck-test-gemm-$words" "$@" "$words"; done
    for order in tokens_first features_first tokens_first_with_an_activation features_first_with_an_activation; do
        try "racecheck-test-gemm-turns-$order" "$@" --exact "every_method::every_tile_takes_several_turns_$order"
    done
}

sanitizers() {
    sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) || {
        echo "sanitizers: compute-sanitizer is not here"
        failed=1
        return
    }
    # One after another: side by side they take far longer, and so do tests under racecheck.
    for tool in memcheck initcheck synccheck racecheck; do
        case $tool in racecheck) threads=1 ;; *) threads=4 ;; esac
        for test in "$here"/test-*; do
            name=$(basename "$test")
            only= without= with= at_once=$threads
            case $tool-$name in
            racecheck-test-gemm)
                racecheck_gemm
                continue
                ;;
            # Every kernel once: the tests of all products would take another nine minutes a tool.
            *-test-gemm) only="again endings turns graph long across" ;;
            # cuSPARSELt's kernels have hazards of their own. Where it is found without being named this fails.
            racecheck-test-dispatch) without="env -u TWOFOUR_CUSPARSELT" ;;
            # cuBLASLt's GEMMs of every head alone take longer than a test may.
            racecheck-test-transformer) only="--skip by_gemms" ;;
            # Whole training runs: their kernels are those of the tests of layers and of transformers.
            racecheck-test-nn-*) continue ;;
            # NCCL's kernels and calls have findings of their own.
            *-test-nn-cuda_ranks) with="--report-api-errors no --kernel-name-exclude kns=nccl" at_once=1 ;;
            esac
            # shellcheck disable=SC2086  # words
            try "$tool-$name" $without "$sanitizer" --tool "$tool" --error-exitcode 9 $with \
                "$test" --test-threads $at_once $only
        done
    done
}

suites() {
    for suite in prune layer decode gemm attention generate; do
        try "suite-$suite" "$here/twofour-bench" cuda "$suite" --force -o "$out/$suite.json"
    done
}

step() {
    for model in vit-l gpt2; do
        try "suite-step-$model" "$here/twofour-bench" cuda step --model "$model" --force -o "$out/step-$model.json"
    done
}

# Those whose table docs/reference/benchmarks.md has.
encoder() {
    try encoder-sam-vit-b "$here/twofour-bench" encoder sam-vit-b --batch 1,8 --rounds 5 --device cuda --force \
        -o "$out/encoder-sam-vit-b.json"
    try encoder-sam-vit-h "$here/twofour-bench" encoder sam-vit-h --batch 4 --rounds 5 --device cuda --force \
        -o "$out/encoder-sam-vit-h.json"
}

# A part of the grid: whoever has a GPU for minutes calls again.
grid() {
    [ -e "$out/grid.json" ] || [ ! -e "$here/grid.json" ] || cp "$here/grid.json" "$out/grid.json" || exit 1
    # It begins no cell in the last 20 seconds; a cell, and a weight's random numbers and kernels before it, may take
    # some.
    try suite-grid "$here/twofour-bench" cuda grid --limit $((${TWOFOUR_LIMIT:-300} - 20)) -o "$out/grid.json"
    tail -n 4 "$out/suite-grid.log"
}

# Layers with a bias, GELU and scales. From the folder, so that the command in the results names no other.
epilogues() {
    for epilogue in bias bias-gelu scales; do
        try "suite-grid-$epilogue" env -C "$here" ./twofour-bench cuda grid --epilogue "$epilogue" \
            --shapes bench/remote/epilogue_shapes.txt --force \
            -o "$out/grid-epilogue-$epilogue.json"
    done
}

# The Python package: its tests on the device, then each benchmark. torch and pytest must be installed here.
python() {
    site=$here/python/site
    python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$here"/python/twofour-*.whl ||
        exit 1
    export PYTHONPATH="$site"
    # On several processes where pytest-xdist is installed: one takes longer than ten minutes.
    workers=$(python3 -c 'import xdist' 2>/dev/null && echo "-n 6")
    # shellcheck disable=SC2086  # words
    try python-tests python3 -m pytest -q $workers -p no:cacheprovider -k "cuda or nccl or not cpu" "$here/python/tests"
    tail -n 3 "$out/python-tests.log"
    for name in host linear vit_step; do
        try "python-$name" python3 "$here/python/python/$name.py" -o "$out/python-$name.json"
    done
}

for part in $parts; do
    case $part in
    tests | sanitizers | suites | step | encoder | grid | epilogues | python) ;;
    *)
        echo "run: $part is none of tests, sanitizers, suites, step, encoder, grid, epilogues, python" >&2
        exit 2
        ;;
    esac
done
# First, whatever is asked for: tests skip where there is no device, and that is no pass here.
[ $failed -eq 0 ] || exit 1
for part in $parts; do $part; done
exit $failed
