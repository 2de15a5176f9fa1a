#!/usr/bin/env bash
# Packs vLLM 0.25.1 for a Hopper GPU host that has Python 3.12, torch 2.11 and transformers, but no network.
#
#   vllm_kit.sh OUT      ->  OUT/*.whl, OUT/vllm.tar.xz, OUT/install.sh     (about 45 MiB; runs on sm_90 only)
#
# On the GPU host:  . OUT/install.sh [SITE]     installs into SITE (default ./vllm_site) and sets PYTHONPATH.
# Of vLLM's extensions only the stable C library and FlashAttention 3 are needed for dense models; GPU code of other
# architectures is emptied, which is most of the C library.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:?where to put the kit}")
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=()
for tag in 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
for tag in 2014 2010 1; do platforms+=(--platform "manylinux${tag}_x86_64"); done
get() { # folder, requirements...
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$@"
}

# What a torch and transformers installation lacks; pinned, so that two kits are equal.
get "$out" annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0 \
    compressed-tensors==0.17.0 depyf==0.20.0 distro==1.9.0 fastapi==0.136.3 httpcore2==2.16.2 httpx2==2.16.2 \
    jiter==0.19.0 lark==1.2.2 llguidance==1.7.6 msgspec==0.23.0 openai==3.57.0 openai-harmony==0.0.8 \
    partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4 pydantic-core==2.50.5 \
    python-multipart==0.0.34 pyzmq==27.3.0 setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0 \
    truststore==0.10.5 typing-inspection==0.4.5 xgrammar==0.2.9

get "$work" vllm==0.25.1
cd "$work"
unzip -q vllm-0.25.1-*.whl
libraries=(vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so)
for library in "${libraries[@]}"; do
    python3 "$here/prune_fatbins.py" "$library" "$library.small" 90
    mv "$library.small" "$library"
done
tar cf kit.tar --exclude='*.so' --exclude='vllm/vllm-rs' --exclude='vllm/third_party/deep_gemm/include' \
    vllm vllm-0.25.1.dist-info
tar rf kit.tar "${libraries[@]}"
xz -T2 -6 -c kit.tar >"$out/vllm.tar.xz"

cat >"$out/install.sh" <<'INSTALL'
# Source this: installs the kit beside it into the folder given (default ./vllm_site), once.
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=${1:-./vllm_site}
if [ ! -f "$site/.complete" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$kit"/*.whl
    tar xJf "$kit/vllm.tar.xz" -C "$site"
    touch "$site/.complete"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
INSTALL
du -sh "$out" "$out"/*
