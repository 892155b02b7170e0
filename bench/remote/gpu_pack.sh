#!/bin/sh
# Puts all that checks and times the GPU's kernels into one folder: tests and the command as binaries, and kernels
# compiled ahead. For a machine with a GPU and neither Rust nor a compiler: copy the folder there and run `FOLDER/run
# OUT`.
#
#   bench/remote/gpu_pack.sh FOLDER [ARCHITECTURE]
#
# ARCHITECTURE is a value of `twofour kernels --arch`, by default sm_90a.
set -eu
folder=${1:?usage: bench/remote/gpu_pack.sh FOLDER [ARCHITECTURE]}
architecture=${2:-sm_90a}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/../.."

cargo build --release -p twofour-cli -p twofour-bench
for program in twofour twofour-bench; do strip -o "$folder/$program" "target/release/$program"; done
rm -f "$folder"/test-*
# Builds the tests of package $1 whose names match $2, and packs those that need a device, each as $3-NAME. Each line of
# cargo's messages that names an executable names a test's source, too. The messages go to a file, because in a pipe a
# failed build would not end this.
messages=$(mktemp) executables=$(mktemp)
trap 'rm -f "$messages" "$executables"' EXIT
pack_tests() {
    cargo test -p "$1" --test "$2" --no-run --message-format json >"$messages"
    sed -n 's|.*"kind":\["test"\].*"name":"\([a-z0-9_]*\)".*"executable":"\([^"]*\)".*|\1 \2|p' \
        "$messages" >"$executables"
    built=$(grep -c '^{"reason":"compiler-artifact".*"kind":\["test"\]' "$messages" || true)
    found=0
    while read -r name executable; do
        found=$((found + 1))
        case $name in
        # Without a device, for machines with a compiler.
        compile | lanes | methods) ;;
        *) strip -o "$folder/$3-$name" "$executable" ;;
        esac
    done <"$executables"
    [ "$found" -gt 0 ] && [ "$found" -eq "$built" ] || {
        echo "gpu_pack: $1: cargo names $built tests, and $found executables were found" >&2
        exit 1
    }
}
pack_tests twofour-cuda '*' test
pack_tests twofour-transformer '*' test
pack_tests twofour-nn 'cuda*' test-nn
# What the tests of image encoders read.
rm -rf "$folder/checkpoints"
mkdir "$folder/checkpoints"
for kind in vit dinov2 dinov2_gated dinov2_with_registers sam; do
    cp -r "crates/twofour-nn/tests/fixtures/checkpoints/$kind" "$folder/checkpoints"
done
cp bench/remote/gpu_run.sh "$folder/run"
mkdir -p "$folder/bench/remote"
cp bench/remote/epilogue_shapes.txt "$folder/bench/remote"
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
