# vLLM without kernels ("empty" target): its own scheduler, offloading manager and tiers in pure Python; no compiler, no CUDA.
VERSION=0.33.0

install() {
    local wheels=build/kv-envs/wheels
    pip_install "$1" 'setuptools>=78,<81' setuptools_scm setuptools-rust wheel
    # The version is written into the source's metadata; an empty build would add a suffix to it, and pip would refuse that.
    [ -f "$wheels"/vllm-$VERSION-*.whl ] || VLLM_VERSION_OVERRIDE=$VERSION VLLM_TARGET_DEVICE=empty "$1" -m pip \
        --disable-pip-version-check wheel --no-deps --no-build-isolation --no-binary vllm --wheel-dir "$wheels" "vllm==$VERSION"
    pip_install "$1" --no-deps "$wheels"/vllm-$VERSION-*.whl
    # Of its requirements those that the scheduler side imports.
    pip_install "$1" aiohttp cachetools cbor2 fastapi llguidance openai openai-harmony partial-json-parser py-cpuinfo pybase64 pyzmq \
        requests uvloop xgrammar
}

check() {
    "$1" -c 'import farpool, vllm.v1.kv_offload.tiering.manager, vllm.v1.core.kv_cache_utils'
}
