"""Training loops that libraries run for the user: transformers' Trainer, accelerate, Lightning."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.ecosystem.optimizers import regression
from tests.ecosystem.program import Place, Program
from tests.ecosystem.text_models import language_model, tokens

__all__ = ["PROGRAMS", "Sentences"]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens that a language model is to predict."""

    def __init__(self, count: int = 8) -> None:
        self._rows = tokens(count, 8)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _trainer(**settings: Any) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        from transformers import Trainer, TrainingArguments

        model = place(language_model("gpt2", bos_token_id=1, eos_token_id=2))
        rows = Sentences()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                **{
                    "per_device_train_batch_size": 2,
                    "max_steps": 3,
                    "use_cpu": True,
                    "save_strategy": "no",
                    "report_to": [],
                    "logging_steps": 1,
                    "disable_tqdm": True,
                    "dataloader_pin_memory": False,
                    **settings,
                },
            )
            trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
            yield torch.tensor(trainer.train().training_loss)
            yield torch.tensor([record["grad_norm"] for record in trainer.state.log_history if "grad_norm" in record])
            yield torch.tensor(trainer.evaluate()["eval_loss"])
        yield from model.parameters()

    return run


def _trainer_of_adapters(place: Place) -> Iterator[torch.Tensor]:
    import peft
    from transformers import Trainer, TrainingArguments

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    model = place(peft.get_peft_model(language_model("llama"), config))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=3,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            gradient_checkpointing=True,
        )
        yield torch.tensor(Trainer(model, arguments, train_dataset=Sentences()).train().training_loss)
    yield from model.parameters()


def _accelerate(**settings: Any) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, **settings)
        model = place(regression())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows = TensorDataset(torch.randn(12, 24), torch.randn(12, 4))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        wrapped, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, DataLoader(rows, batch_size=3, shuffle=True), schedule
        )
        for inputs, targets in loader:
            with accelerator.accumulate(wrapped):
                loss = nn.functional.mse_loss(wrapped(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    yield accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                yield accelerator.gather(loss.detach())
        yield from accelerator.unwrap_model(wrapped).parameters()
        AcceleratorState._reset_state(reset_partial_state=True)

    return run


def _lightning(**settings: Any) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        import lightning

        class Regression(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.body = regression()
                self.losses: list[torch.Tensor] = []

            def _loss(self, batch: Any) -> torch.Tensor:
                inputs, targets = batch
                return nn.functional.mse_loss(self.body(inputs), targets)

            def training_step(self, batch: Any, _: int) -> torch.Tensor:
                loss = self._loss(batch)
                self.log("loss", loss)
                self.losses.append(loss.detach())
                return loss

            def validation_step(self, batch: Any, _: int) -> None:
                self.log("validation", self._loss(batch))

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        model = place(Regression())
        rows = TensorDataset(torch.randn(8, 24), torch.randn(8, 4))
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(model, DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=4))
        yield trainer.callback_metrics["validation"]
        yield from model.losses
        yield from model.parameters()

    return run


PROGRAMS = [
    Program("Trainer/plain", _trainer(), copies=4),
    Program("Trainer/gradient checkpointing", _trainer(gradient_checkpointing=True), copies=4),
    Program("Trainer/accumulation", _trainer(gradient_accumulation_steps=2), copies=4),
    Program("Trainer/bf16", _trainer(bf16=True), copies=4),
    Program("Trainer/Adafactor", _trainer(optim="adafactor", lr_scheduler_type="cosine"), copies=2),
    Program("Trainer/SGD and label smoothing", _trainer(optim="sgd", label_smoothing_factor=0.1), copies=2),
    Program("Trainer/NEFTune", _trainer(neftune_noise_alpha=5.0), copies=4),
    Program("Trainer/DataLoader workers", _trainer(dataloader_num_workers=1), copies=4),
    Program("Trainer/LoRA with gradient checkpointing", _trainer_of_adapters),
    Program("accelerate/plain", _accelerate(), copies=4),
    Program("accelerate/accumulation", _accelerate(gradient_accumulation_steps=2), copies=4),
    Program("accelerate/bf16", _accelerate(mixed_precision="bf16"), copies=4),
    Program("Lightning/plain", _lightning(), copies=4),
    Program(
        "Lightning/accumulation and clipping", _lightning(accumulate_grad_batches=2, gradient_clip_val=0.5), copies=4
    ),
    Program("Lightning/bf16", _lightning(precision="bf16-mixed"), copies=4),
    Program("Lightning/double precision", _lightning(precision="64-true"), copies=4),
    Program("Lightning/true bf16", _lightning(precision="bf16-true"), copies=4),
]
