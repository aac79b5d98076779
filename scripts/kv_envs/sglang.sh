# SGLang without its kernels: its own controllers, host pools and hashes (C++, built when the environment is checked) on the CPU.
# They need g++ and the headers of OpenSSL. https://pypi.org/project/sglang (triton makes most of the 1.2 GB).
VERSION=0.5.23

install() {
    pip_install "$1" --no-deps "sglang==$VERSION" apache-tvm-ffi==0.1.11 compressed-tensors torch_memory_saver triton==3.6.0
    # Of its requirements those that importing the hierarchical cache imports.
    pip_install "$1" aiohttp dill einops fastapi gguf ipython loguru mistral_common ninja nvidia-ml-py orjson pybase64 pybind11 \
        python-multipart pyzmq requests sentencepiece starlette tiktoken xxhash zstandard
}

check() {
    "$1" -c '
import tests.kv.connectors.programs.sglang_imports
import farpool
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.utils import get_hash_str
assert len(get_hash_str([1, 2], None, page_size=2)) == 1'
}
