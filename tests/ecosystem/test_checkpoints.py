"""Checkpoints of offloaded models by the libraries that write them: equal to plain ones, resumed to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool
from tests.tensors.bits import assert_same

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(fast="64KiB", dram="64MiB") as pool:
        yield pool


def language_model(seed: int = 0) -> Any:
    """A tiny model with dropout and tied embeddings."""
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_paged(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        assert type(parameter) is PagedTensor, name


def assert_same_state(left: Any, right: Any) -> None:
    """Compare nested state."""
    if isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in right:
            assert_same_state(left[key], right[key])
    elif isinstance(right, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same_state(one, other)
    else:
        assert_same(left, right)


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["5GB", "30KB"], ids=["one file", "sharded"])
def test_save_pretrained_writes_the_files_of_the_plain_model(shard: str, tmp_path: Path, pool: Pool) -> None:
    language_model().save_pretrained(tmp_path / "plain", max_shard_size=shard)
    farpool.offload(language_model(), pool).save_pretrained(tmp_path / "paged", max_shard_size=shard)
    assert files(tmp_path / "paged") == files(tmp_path / "plain")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "paged")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert_same_state(dict(loaded.state_dict()), dict(language_model().state_dict()))


DATA = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(0, 64, (24, 16), generator=torch.Generator().manual_seed(7))
]


def hugging_face_trainer(folder: Path, model: Any, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**{**arguments, **options}),
        train_dataset=DATA,
        eval_dataset=DATA[:8],
    )


def test_a_run_of_trainer_is_resumed_to_the_same_bits(tmp_path: Path, pool: Pool) -> None:
    hugging_face_trainer(tmp_path / "plain", language_model()).train()
    whole = farpool.offload(language_model(), pool)
    hugging_face_trainer(tmp_path / "whole", whole).train()
    resumed = farpool.offload(language_model(1), pool)
    hugging_face_trainer(tmp_path / "resumed", resumed).train(
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")
    )
    assert_paged(resumed)
    assert_same_state(dict(resumed.state_dict()), dict(whole.state_dict()))
    for step in ("checkpoint-3", "checkpoint-6"):
        expected = files(tmp_path / "plain" / step)
        for run in ("whole",) if step == "checkpoint-3" else ("whole", "resumed"):
            found = files(tmp_path / run / step)
            assert found.keys() == expected.keys()
            assert found["model.safetensors"] == expected["model.safetensors"]
            assert_same_state(*[torch.load(tmp_path / r / step / "optimizer.pt") for r in (run, "plain")])
    assert (
        files(tmp_path / "whole/checkpoint-3")["optimizer.pt"] == files(tmp_path / "plain/checkpoint-3")["optimizer.pt"]
    )


def test_trainer_loads_the_best_model_at_the_end(tmp_path: Path, pool: Pool) -> None:
    options = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        # The last one is not to be the best one.
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    plain = hugging_face_trainer(tmp_path / "plain", language_model(), **options)
    plain.train()
    paged = hugging_face_trainer(tmp_path / "paged", farpool.offload(language_model(), pool), **options)
    paged.train()
    best = Path(paged.state.best_model_checkpoint).name
    assert best == Path(plain.state.best_model_checkpoint).name
    assert best != "checkpoint-6"
    assert_paged(paged.model)
    assert_same_state(dict(paged.model.state_dict()), dict(plain.model.state_dict()))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_saved_as_that_of_the_plain_model(tmp_path: Path, pool: Pool) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        model = language_model()
        torch.manual_seed(3)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
        )

    adapted().save_pretrained(tmp_path / "plain")
    farpool.offload(adapted(), pool).save_pretrained(tmp_path / "paged")
    plain, paged = files(tmp_path / "plain"), files(tmp_path / "paged")
    assert paged == plain
    target = farpool.offload(language_model(), pool)
    loaded = peft.PeftModel.from_pretrained(target, str(tmp_path / "paged"))
    assert_same_state(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(adapted()))


# -- accelerate -------------------------------------------------------------------------------------------------------


def accelerated(folder: Path, model: nn.Module, *, steps: int, save_at: int = 0, load: Path | None = None) -> Any:
    """Train with accelerate; save the state, or begin with one that was saved."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    torch.manual_seed(5)
    if load is not None:
        accelerator.load_state(str(load))
    for step in range(save_at if load is not None else 0, steps):
        if step == save_at and load is None:
            accelerator.save_state(str(folder))
        rows = torch.stack([row["input_ids"] for row in DATA[4 * step : 4 * step + 4]])
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [dict(model.state_dict()), optimizer.state_dict(), torch.rand(3)]


def test_a_run_of_accelerate_is_resumed_to_the_same_bits(tmp_path: Path, pool: Pool) -> None:
    plain = accelerated(tmp_path / "plain", language_model(), steps=6, save_at=3)
    model = farpool.offload(language_model(), pool)
    whole = accelerated(tmp_path / "paged", model, steps=6, save_at=3)
    expected, found = files(tmp_path / "plain"), files(tmp_path / "paged")
    assert found == expected
    model = farpool.offload(language_model(1), pool)
    resumed = accelerated(tmp_path, model, steps=6, save_at=3, load=tmp_path / "paged")
    assert_paged(model)
    assert_same_state(whole, plain)
    assert_same_state(resumed, plain)


# -- Lightning --------------------------------------------------------------------------------------------------------


def lightning_module(seed: int = 0) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(2)
            rows = torch.utils.data.TensorDataset(
                torch.randn(24, 16, generator=generator), torch.randint(0, 4, (24,), generator=generator)
            )
            return torch.utils.data.DataLoader(rows, batch_size=8)

    return Module()


def lightning_fit(folder: Path, module: Any, epochs: int, checkpoint: Path | None = None) -> Path:
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return folder / f"{epochs}.ckpt"


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_lightning_is_resumed_to_the_same_bits(tmp_path: Path, pool: Pool) -> None:
    plain = lightning_module()
    first = lightning_fit(tmp_path / "plain", plain, 2)
    whole = farpool.offload(lightning_module(), pool)
    saved = lightning_fit(tmp_path / "whole", whole, 2)
    assert saved.read_bytes() == first.read_bytes()
    assert_same_state(torch.load(saved, weights_only=True), torch.load(first, weights_only=True))
    plain = lightning_module()
    last = lightning_fit(tmp_path / "plain", plain, 4)
    whole = farpool.offload(lightning_module(), pool)
    lightning_fit(tmp_path / "whole", whole, 4)
    resumed = farpool.offload(lightning_module(1), pool)
    end = lightning_fit(tmp_path / "resumed", resumed, 4, saved)
    assert_paged(resumed)
    assert_same_state(dict(whole.state_dict()), dict(plain.state_dict()))
    assert_same_state(dict(resumed.state_dict()), dict(plain.state_dict()))
    states = [torch.load(path, weights_only=True)["optimizer_states"] for path in (end, last)]
    assert_same_state(*states)


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def trained(model: Any, steps: int = 2) -> Any:
    """The model and its optimizer after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(4)
    for step in range(steps):
        rows = torch.stack([row["input_ids"] for row in DATA[4 * step : 4 * step + 4]])
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_distributed_checkpoint_is_saved_and_loaded_in_place(
    asynchronous: bool, tmp_path: Path, pool: Pool, group: None
) -> None:
    import torch.distributed.checkpoint as dcp

    def save(state: dict[str, Any], folder: Path) -> Any:
        if not asynchronous:
            dcp.save(state, checkpoint_id=folder)
            return None
        return dcp.async_save(state, checkpoint_id=folder)

    plain, paged = language_model(), farpool.offload(language_model(), pool)
    optimizers = [trained(plain), trained(paged)]
    states = [
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
        for model, optimizer in zip((plain, paged), optimizers, strict=True)
    ]
    for state in states:
        state["rows"] = state["model"]["transformer.wte.weight"][3:5]
    running = [save(state, tmp_path / name) for state, name in zip(states, ("plain", "paged"), strict=True)]
    expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for model in (plain, paged):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    for one in running:
        if one is not None:
            one.result(timeout=60)
    for folder in ("plain", "paged"):
        target = farpool.offload(language_model(1), pool)
        state = {"model": target.state_dict(), "optimizer": trained(target).state_dict()["state"]}
        state["rows"] = pool.zeros(2, 32)
        dcp.load(state, checkpoint_id=tmp_path / folder)
        assert_paged(target)
        assert_same_state(dict(target.state_dict()), expected)
        assert_same_state(state["optimizer"], states[0]["optimizer"])
        assert_same(state["rows"], expected["transformer.wte.weight"][3:5])
    other = language_model(1)
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "paged")
    assert_same_state(dict(other.state_dict()), expected)


# -- memory -----------------------------------------------------------------------------------------------------------

SAVE = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
import torch, farpool
import safetensors.torch, transformers, lightning.fabric.utilities.cloud_io as cloud_io
import torch.distributed.checkpoint as dcp

def status(key):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(key))

folder = pathlib.Path(sys.argv[1])
config = transformers.GPT2Config(vocab_size=1024, n_positions=64, n_embd=512, n_layer=7, n_head=8)
with farpool.Pool("8MiB", [farpool.Dram("4MiB"), farpool.Nvme(folder / "far.pool", "512MiB")]) as pool:
    model = farpool.offload(transformers.GPT2LMHeadModel(config), pool)
    size = sum(p.nbytes for p in model.parameters())
    savers = {
        "torch.save": lambda: torch.save(model.state_dict(), folder / "a.pt"),
        "save_model": lambda: safetensors.torch.save_model(model, str(folder / "b.safetensors")),
        "save_pretrained": lambda: model.save_pretrained(folder / "c"),
        "lightning": lambda: cloud_io._atomic_save({"state_dict": model.state_dict()}, folder / "d.ckpt"),
        "dcp": lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "e", no_dist=True),
    }
    # The least of three rounds: the system may take pages away before one and give them back while it lasts.
    grown = dict.fromkeys(savers, sys.maxsize)
    for round in range(3):
        for name, save in savers.items():
            open("/proc/self/clear_refs", "w").write("5")
            before = status("VmRSS")
            save()
            grown[name] = min(grown[name], status("VmHWM") - before)
    print(json.dumps([size, grown]))
"""


def test_no_saver_holds_the_weights_in_plain_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAVE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back to the system at once
    )
    assert done.returncode == 0, done.stderr
    size, grown = json.loads(done.stdout.splitlines()[-1])
    assert size > 80 << 20
    for saver, nbytes in grown.items():
        # Fast tier and DRAM tier may have been touched meanwhile, and there are buffers: some 30 MiB altogether.
        assert nbytes < size / 2, (saver, nbytes, size)
