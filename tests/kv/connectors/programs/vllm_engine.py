"""A whole vLLM engine on the CPU, with a tiny model, whose KV is saved to nodes and loaded again.

``python -m tests.kv.connectors.programs.vllm_engine TRANSPORT FOLDER`` makes a model in a folder, generates without
a tier, then with it, with loads that all fail, and after the node was killed, and prints its counts.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv.engines.vllm import FarpoolTier

PROMPTS = [[(37 * token + prompt) % 1000 for token in range(1024)] for prompt in range(4)]
BLOCK_TOKENS = 32
PRIMARY_BYTES = 3 << 20  # less than the prompts need, or nothing would ever be loaded from the tier


class CopyingWorker(OffloadingWorker):
    """Copies between the engine's KV and the primary tier with torch; vLLM's own worker is for GPUs alone."""

    def __init__(self, caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        assert len(caches.group_data_refs) == 1
        self._engine = [cache.tensor for cache in caches.tensors]
        self._pages = [cache.page_size_bytes for cache in caches.tensors]
        self._primary = [region.create_next_worker_view(page * blocks_per_chunk) for page in self._pages]
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._done: list[TransferResult] = []

    def _copy(self, job: int, blocks: Any, chunks: Any, storing: bool) -> bool:
        first, moved = blocks.block_indices[0] % self._blocks_per_chunk, 0
        for number, block in enumerate(blocks.block_ids):
            place, part = divmod(first + number, self._blocks_per_chunk)
            for ours, theirs, page in zip(self._engine, self._primary, self._pages, strict=True):
                mine, row = ours[int(block)], theirs[int(chunks.block_ids[place]), part * page : (part + 1) * page]
                row.copy_(mine) if storing else mine.copy_(row)
                moved += page
        self._done.append(TransferResult(job, True, moved, 1e-6))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, storing=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec, storing=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._primary.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with a worker that runs on CPUs."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class CountingTier(FarpoolTier):
    """The tier under test, which counts the blocks of its jobs."""

    made: ClassVar[list[CountingTier]] = []

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.loads = self.loaded = 0
        CountingTier.made.append(self)

    def submit_load(self, job_metadata: Any) -> None:
        self.loads += len(job_metadata.keys)
        super().submit_load(job_metadata)

    def _finish(self, job: Any, reasons: Any, seconds: float) -> None:
        if job.is_promotion:
            self.loaded += sum(reason is None for reason in reasons)
        super()._finish(job, reasons, seconds)

    def counts(self) -> tuple[int, int]:
        counts = self.loads, self.loaded
        self.loads = self.loaded = 0
        return counts


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def engine(folder: Path, tier: dict[str, Any] | None = None) -> LLM:
    transfer = tier and KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": __spec__.name,
            "cpu_bytes_to_use": PRIMARY_BYTES,
            "secondary_tiers": [tier],
        },
    )
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2048,
        block_size=BLOCK_TOKENS,
        max_num_seqs=4,
        kv_transfer_config=transfer,
    )


def generate(llm: LLM) -> list[list[int]]:
    """Return tokens for each prompt, one after the other, each without the blocks in the engine's own prefix cache."""
    tokens = []
    for prompt in PROMPTS:
        llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    return tokens


def damage(node: RunningNode) -> int:
    """Flip a bit in each payload of a node; return how many there were."""
    number = 0
    with open(node.folder / "objects-0.data", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(b"fpkv")
        while at >= 0:
            memory[at + 1000] ^= 1
            number += 1
            at = memory.find(b"fpkv", at + 64)
    return number


def main(transport: str, folder: str) -> None:
    model = Path(folder)
    make_model(model)
    facts: dict[str, Any] = {"expected": generate(engine(model))}
    with running_node() as node:
        llm = engine(
            model,
            {
                "type": "CountingTier",
                "module_path": __spec__.name,
                "nodes": [node.address],
                "weights_id": "seed 0",
                "transport": transport,
            },
        )
        # The module is loaded a second time, by its name.
        tier = sys.modules[__spec__.name].CountingTier.made[-1]
        for name, change in (
            ("cold", None),
            ("warm", None),
            ("damaged", lambda: damage(node)),
            ("mended", None),
            ("killed", node.kill),
        ):
            changed = change and change()
            tokens = generate(llm)
            asked, loaded = tier.counts()
            facts[name] = {"tokens": tokens, "asked": asked, "loaded": loaded, "changed": changed}
        facts["counters"] = dict(tier._cache.stats())
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
