#!/bin/sh
# Puts all that checks and times the GPU's kernels into one folder: tests and the command as binaries, and kernels compiled ahead. For a
# machine with a GPU and neither Rust nor a compiler: copy the folder there and run `FOLDER/run OUT`.
#
#   bench/gpu_pack.sh FOLDER [ARCHITECTURE]     the architecture as `twofour kernels --arch` has it; sm_90a if none is given
set -eu
folder=${1:?usage: bench/gpu_pack.sh FOLDER [ARCHITECTURE]}
architecture=${2:-sm_90a}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.."

cargo build --release -p twofour-cli
strip -o "$folder/twofour" target/release/twofour
rm -f "$folder"/test-*
# Each line of cargo's messages that names an executable names a test's source, too.
cargo test -p twofour-cuda --no-run --message-format json |
    sed -n 's|.*"kind":\["test"\].*"name":"\([a-z0-9_]*\)".*"executable":"\([^"]*\)".*|\1 \2|p' |
    while read -r name executable; do
        # Those without a device are for machines with a compiler.
        case $name in
        adamw | borrowed | borrowed_int4 | compress | decode_attention | devices | dispatch | gemm | int4 | layer | passes | prune | transformer) strip -o "$folder/test-$name" "$executable" ;;
        esac
    done
cargo test -p twofour-nn --test cuda --test cuda_bert --test cuda_image --test cuda_inference --test cuda_ranks --test cuda_vit --no-run --message-format json |
    sed -n 's|.*"kind":\["test"\].*"name":"\([a-z0-9_]*\)".*"executable":"\([^"]*\)".*|\1 \2|p' |
    while read -r name executable; do strip -o "$folder/test-nn-$name" "$executable"; done
cp bench/gpu_run.sh "$folder/run"
# The Python package, its tests and its benchmarks, where maturin is installed.
rm -rf "$folder/python"
if command -v maturin >/dev/null; then
    mkdir -p "$folder/python"
    maturin build --release --out "$folder/python"
    cp -r python/tests bench/python "$folder/python"
fi
rm -rf "$folder/cache"
TWOFOUR_CACHE=$folder/cache "$folder/twofour" kernels --arch "$architecture"
du -sh "$folder"
