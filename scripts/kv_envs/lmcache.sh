# LMCache: its storage manager, server and tools, on a CPU.
VERSION=0.5.6

install() {
    pip_install "$1" --no-deps "lmcache==$VERSION"
    # Of its requirements those that the server and the tools import; the others are for GPUs and for other second levels.
    pip_install "$1" aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi httpx numba opentelemetry-exporter-otlp \
        opentelemetry-exporter-prometheus opentelemetry-sdk py-cpuinfo pyzmq requests safetensors sortedcontainers uvicorn
}

check() {
    "$1" -c 'import farpool, lmcache.lmcache_native, lmcache.v1.distributed.storage_manager, lmcache.v1.multiprocess.token_hasher'
}
