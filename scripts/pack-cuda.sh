#!/usr/bin/env bash
# Packs what a GPU machine without network or Rust needs to run this project on CUDA.
#
#   scripts/pack-cuda.sh OUT [--with-mlx]
#
# OUT gets the release binaries (`trellis` and the tests' executables), libmlxc.so, the golden cases and `run.sh`.
# With --with-mlx it also gets the CUDA build of MLX and NVIDIA's libraries (about 2 GB), if that is what is set up here
# (`cargo xtask mlx --backend cuda13`). Without it, the machine must have a site-packages folder with the same MLX:
# binaries made against MLX for the CPU run with the CUDA build's libmlx.so, as both are one version of one library.
set -euo pipefail

out="${1:?usage: scripts/pack-cuda.sh OUT [--with-mlx]}"
with_mlx="${2:-}"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out/bin" "$out/lib" "$out/golden"

folders="$(cargo xtask mlx --print)"
mapfile -t libs < <(python3 -c 'import json, sys; print("\n".join(json.load(sys.stdin)["lib"]))' <<<"$folders")

# Prints "NAME FILE" of each executable that Cargo reports.
executables() {
  python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable"):
        print(message["target"]["name"], message["executable"])'
}
{
  cargo build --release --package mlx-trellis-cli --message-format json
  cargo test --release --no-run --package mlx-trellis-tests --message-format json
} | executables | while read -r name file; do
  strip -o "$out/bin/$name" "$file"
done
cp "${libs[0]}/libmlxc.so" "$out/lib/"
cp tests/golden/* "$out/golden/"
if [ "$with_mlx" = --with-mlx ]; then
  # <site>/mlx/lib: NVIDIA's wheels and MLX's own libraries lie beside <site>/mlx.
  site="$(cd "${libs[1]}/../.." && pwd)"
  mkdir -p "$out/site/mlx"
  cp -r "${libs[1]}" "$site/mlx/include" "$out/site/mlx/"
  find "$site" -maxdepth 1 \( -name nvidia -o -name 'mlx_cuda*.libs' \) -exec cp -r {} "$out/site/" \;
fi

cat >"$out/run.sh" <<'RUN'
#!/usr/bin/env bash
# ./run.sh NAME ARGS...: runs bin/NAME on CUDA.
#   MLX_SITE      site-packages folder that holds mlx/lib/libmlx.so of the CUDA wheel (default: site, beside this file)
#   NVIDIA_LIBS   folders of NVIDIA's libraries, with : between, where they are not in MLX_SITE/nvidia
#   CUDA_HOME     a CUDA toolkit, for the headers that kernels are compiled with (default /usr/local/cuda)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
site="${MLX_SITE:-$here/site}"
paths="$site/mlx/lib:$here/lib"
for folder in "$site"/mlx_cuda*.libs "$site"/nvidia/*/lib; do
  [ -d "$folder" ] && paths="$paths:$folder"
done
export LD_LIBRARY_PATH="$paths${NVIDIA_LIBS:+:$NVIDIA_LIBS}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export TRELLIS_GOLDEN="$here/golden"
# A chain of products in one piece, so that times are the GPU's.
export MLX_MAX_OPS_PER_BUFFER="${MLX_MAX_OPS_PER_BUFFER:-100000}" MLX_MAX_MB_PER_BUFFER="${MLX_MAX_MB_PER_BUFFER:-1000000}"
program="$1"
shift
exec "$here/bin/$program" "$@"
RUN
chmod +x "$out/run.sh"
du -sh "$out"/* >&2
