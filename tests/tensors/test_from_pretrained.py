"""Checkpoints of transformers, loaded straight into a pool, against loading them plain and offloading."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5ForConditionalGeneration,
)

import farpool
from farpool import ArgumentError, ConfigError, Dram, FarpoolWarning, PagedTensor, Pool, PoolFullError, UnsupportedError
from farpool.memory.pool import blocks_of
from farpool.tensors import pretrained
from tests.tensors.bits import assert_same

TOKENS = torch.arange(1, 9).view(1, 8)
IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def bert() -> nn.Module:
    return BertModel(
        BertConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    )


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=64, n_layer=2, n_head=2, n_positions=16, **IDS))


def llama(**options: Any) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            max_position_embeddings=32,
            **IDS,
            **options,
        )
    )


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **IDS
        )
    )


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            num_local_experts=4,
            max_position_embeddings=32,
            **IDS,
        )
    )


def resnet() -> nn.Module:
    return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"))


def outputs_of(model: nn.Module) -> Any:
    with torch.no_grad():
        if isinstance(model, ResNetModel):
            pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
            return model(pixel_values=pixels)[0]
        if isinstance(model, T5ForConditionalGeneration):
            return model(input_ids=TOKENS, labels=TOKENS).logits
        return model(input_ids=TOKENS)[0]


ZOO: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "gpt2": gpt2,  # the table of words is tied to the head
    "llama": llama,  # buffers that are in no file
    "t5": t5,  # one table in four places
    "mixtral": mixtral,  # experts are fused
    "resnet": resnet,  # buffers that are in the file
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Checkpoints, each written at its first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(0)
            made[name] = tmp_path_factory.mktemp(name)
            ZOO[name]().save_pretrained(made[name])
        return made[name]

    return folder


def every_tensor(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return dict(named)


def assert_loaded_like(model: nn.Module, plain: nn.Module, pool: Pool) -> None:
    """As `plain` after `offload`: types, values, ties, gradients wanted, modes, and what it computes."""
    assert type(model) is type(plain)
    expected = outputs_of(plain)
    left, right = every_tensor(model), every_tensor(farpool.offload(plain, pool))
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert type(tensor) is PagedTensor, name
        assert_same(tensor, right[name], name)
        assert isinstance(tensor, nn.Parameter) == isinstance(right[name], nn.Parameter), name
        assert tensor.requires_grad == right[name].requires_grad, name
        assert tensor.stride() == right[name].stride(), name
        assert tensor.device == right[name].device, name
    ties = [
        [list(every).index(n) for n, t in every.items() if t is s] for every in (left, right) for s in every.values()
    ]
    assert ties[: len(left)] == ties[len(left) :]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {n: m.training for n, m in model.named_modules()} == {n: m.training for n, m in plain.named_modules()}
    assert model.config.to_dict() == plain.config.to_dict()  # type: ignore[operator, union-attr]
    assert_same(outputs_of(model), expected, "outputs")


@pytest.mark.parametrize("name", ZOO)
def test_a_model_is_as_if_it_was_offloaded(name: str, folders: Callable[[str], Path], pool: Pool) -> None:
    kind: Any = type(ZOO[name]())
    model = farpool.from_pretrained(kind, folders(name), pool)
    assert_loaded_like(model, kind.from_pretrained(folders(name)), pool)


@pytest.mark.parametrize("name", ZOO)
def test_the_plain_call_inside_paged_does_the_same(name: str, folders: Callable[[str], Path], pool: Pool) -> None:
    kind: Any = type(ZOO[name]())
    plain = kind.from_pretrained(folders(name))
    with farpool.paged(pool):
        model = kind.from_pretrained(folders(name))
    assert_loaded_like(model, plain, pool)


def test_auto_classes_load_what_the_checkpoint_names(folders: Callable[[str], Path], pool: Pool) -> None:
    plain = GPT2LMHeadModel.from_pretrained(folders("gpt2"))
    assert_loaded_like(farpool.from_pretrained(AutoModelForCausalLM, folders("gpt2"), pool), plain, pool)
    with farpool.paged(pool):
        model = AutoModel.from_pretrained(folders("gpt2"))
    assert_loaded_like(model, AutoModel.from_pretrained(folders("gpt2")), pool)


def test_a_sharded_checkpoint_is_loaded(folders: Callable[[str], Path], tmp_path: Path, pool: Pool) -> None:
    LlamaForCausalLM.from_pretrained(folders("llama")).save_pretrained(tmp_path, max_shard_size="64KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = farpool.from_pretrained(LlamaForCausalLM, tmp_path, pool)
    assert_loaded_like(model, LlamaForCausalLM.from_pretrained(tmp_path), pool)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("llama", torch.float64),
        ("llama", "auto"),
        ("gpt2", torch.float16),
        ("t5", torch.float16),  # it keeps some weights in float32
        ("mixtral", torch.bfloat16),
    ],
)
def test_weights_are_converted_to_another_dtype(
    name: str, dtype: Any, folders: Callable[[str], Path], pool: Pool
) -> None:
    kind: Any = type(ZOO[name]())
    model = farpool.from_pretrained(kind, folders(name), pool, dtype=dtype)
    assert_loaded_like(model, kind.from_pretrained(folders(name), dtype=dtype), pool)


def test_a_checkpoint_keeps_its_own_dtype(tmp_path: Path, pool: Pool) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    model = farpool.from_pretrained(LlamaForCausalLM, tmp_path, pool)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_loaded_like(model, LlamaForCausalLM.from_pretrained(tmp_path), pool)
    whole = farpool.from_pretrained(LlamaForCausalLM, tmp_path, pool, dtype=torch.float32)
    assert_loaded_like(whole, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), pool)


def test_a_new_head_gets_the_numbers_that_it_would_get(folders: Callable[[str], Path], pool: Pool) -> None:
    models = []
    folder = folders("bert")  # made before the seed: that takes random numbers, too
    for load in (
        lambda: BertForSequenceClassification.from_pretrained(folder, num_labels=5),
        lambda: farpool.from_pretrained(BertForSequenceClassification, folder, pool, num_labels=5),
    ):
        torch.manual_seed(3)
        models.append(load())
    assert_loaded_like(models[1], models[0], pool)


def test_tables_that_nothing_else_uses_are_read_by_rows(folders: Callable[[str], Path], pool: Pool) -> None:
    alone = farpool.from_pretrained(BertModel, folders("bert"), pool).embeddings.word_embeddings.weight
    tied = farpool.from_pretrained(GPT2LMHeadModel, folders("gpt2"), pool).transformer.wte.weight
    assert alone._storage.cls == "embedding"
    assert tied._storage.cls == "weights"


def test_loaded_weights_take_no_room_below(folders: Callable[[str], Path]) -> None:
    plain = LlamaForCausalLM.from_pretrained(folders("llama"))
    with Pool("192KiB") as pool:  # less than the model, and no lower tier
        model = farpool.from_pretrained(LlamaForCausalLM, folders("llama"), pool)
        assert sum(parameter.nbytes for parameter in model.parameters()) > 2 * pool.fast
        for _ in range(2):
            assert_same(outputs_of(model), outputs_of(plain))
        assert blocks_of(pool).allocation.written <= 4096


def test_a_loaded_model_trains_to_the_same_bits(folders: Callable[[str], Path], pool: Pool) -> None:
    trained = []
    for load in (GPT2LMHeadModel.from_pretrained, lambda path: farpool.from_pretrained(GPT2LMHeadModel, path, pool)):
        model = load(folders("gpt2")).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
        trained.append(model)
    for (name, left), right in zip(trained[1].named_parameters(), trained[0].parameters(), strict=True):
        assert type(left.grad) is PagedTensor, name
        assert_same(left, right, name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_progress_ends_with_everything(name: str, folders: Callable[[str], Path], pool: Pool) -> None:
    calls: list[tuple[int, int]] = []
    model = farpool.from_pretrained(
        type(ZOO[name]()), folders(name), pool, progress=lambda done, total: calls.append((done, total))
    )
    total = sum(tensor.nbytes for tensor in {id(t): t for t in every_tensor(model).values()}.values())
    assert len(calls) > 10
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {whole for _, whole in calls} == {total}
    assert calls[-1] == (total, total)


def test_loading_info_comes_as_without_a_pool(folders: Callable[[str], Path], pool: Pool) -> None:
    expected = GPT2LMHeadModel.from_pretrained(folders("gpt2"), output_loading_info=True)[1]
    assert farpool.from_pretrained(GPT2LMHeadModel, folders("gpt2"), pool, output_loading_info=True)[1] == expected


def test_a_state_dict_inside_paged_is_copied_into_the_pool(folders: Callable[[str], Path], pool: Pool) -> None:
    plain = GPT2LMHeadModel.from_pretrained(folders("gpt2"))
    weights = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with farpool.paged(pool):
        model = GPT2LMHeadModel.from_pretrained(None, config=plain.config, state_dict=weights)
    assert {type(tensor) for tensor in weights.values()} == {torch.Tensor}
    assert_loaded_like(model, GPT2LMHeadModel.from_pretrained(None, config=plain.config, state_dict=weights), pool)


def test_other_threads_load_plain_models(folders: Callable[[str], Path], pool: Pool) -> None:
    loaded: list[Any] = []
    folder = folders("gpt2")
    with farpool.paged(pool):
        thread = threading.Thread(target=lambda: loaded.append(GPT2LMHeadModel.from_pretrained(folder)))
        thread.start()
        thread.join(60)
    assert {type(parameter) for parameter in loaded[0].parameters()} == {nn.Parameter}
    assert pool.live == 0


def test_what_follows_is_plain_again(folders: Callable[[str], Path], pool: Pool) -> None:
    farpool.from_pretrained(GPT2LMHeadModel, folders("gpt2"), pool)
    assert {type(p) for p in GPT2LMHeadModel.from_pretrained(folders("gpt2")).parameters()} == {nn.Parameter}
    with farpool.paged(pool):
        assert type(farpool.from_pretrained(GPT2LMHeadModel, folders("gpt2"), pool).lm_head.weight) is PagedTensor
        assert type(torch.ones(2)) is PagedTensor
    assert type(torch.ones(2)) is torch.Tensor


def test_a_model_may_be_restored_saved_and_loaded_again(
    folders: Callable[[str], Path], tmp_path: Path, pool: Pool
) -> None:
    farpool.restore(farpool.from_pretrained(T5ForConditionalGeneration, folders("t5"), pool)).save_pretrained(tmp_path)
    again = farpool.from_pretrained(T5ForConditionalGeneration, tmp_path, pool)
    assert_loaded_like(again, T5ForConditionalGeneration.from_pretrained(tmp_path), pool)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "device map": ({"device_map": "auto"}, "device_map='auto'.*leave it out"),
    "quantized": ({"quantization_config": {"load_in_4bit": True}}, "quantization_config=.*unquantized"),
    "four bits": ({"load_in_4bit": True}, "load_in_4bit=True"),
    "folder": ({"offload_folder": "x"}, r"nvme=\.\.\."),
    "gguf": ({"gguf_file": "x.gguf"}, "save_pretrained"),
    "parallel": ({"tp_plan": "auto"}, "tensor parallelism"),
    "state dict": ({"state_dict": {"a": 1}}, "farpool.offload"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_cannot_work_are_refused(case: str, folders: Callable[[str], Path], pool: Pool) -> None:
    options, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        farpool.from_pretrained(GPT2LMHeadModel, folders("gpt2"), pool, **options)
    assert pool.live == 0


def test_a_device_map_inside_paged_is_refused(folders: Callable[[str], Path], pool: Pool) -> None:
    folder = folders("gpt2")
    with farpool.paged(pool):
        with pytest.raises(UnsupportedError, match="device_map"):
            GPT2LMHeadModel.from_pretrained(folder, device_map={"": "meta"})
        model = GPT2LMHeadModel.from_pretrained(folder, device_map="cpu")
    assert {type(parameter) for parameter in model.parameters()} == {PagedTensor}


def test_what_is_no_checkpoint_is_a_typed_error(folders: Callable[[str], Path], tmp_path: Path, pool: Pool) -> None:
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel cannot be loaded.*missing.*save_pretrained"):
        farpool.from_pretrained(GPT2LMHeadModel, tmp_path / "missing", pool, local_files_only=True)
    folder = tmp_path / "broken"
    GPT2LMHeadModel.from_pretrained(folders("gpt2")).save_pretrained(folder, max_shard_size="64KB")
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.write_bytes(b"no")
    with pytest.raises(ConfigError, match=shard.name):
        farpool.from_pretrained(GPT2LMHeadModel, folder, pool)
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        farpool.from_pretrained(GPT2LMHeadModel, folder, pool, local_files_only=True)
    gc.collect()
    assert pool.live == 0


def test_pickled_checkpoints_are_refused(folders: Callable[[str], Path], tmp_path: Path, pool: Pool) -> None:
    plain = GPT2LMHeadModel.from_pretrained(folders("gpt2"))
    plain.config.save_pretrained(tmp_path)
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pytorch_model.bin.*save_pretrained"):
        farpool.from_pretrained(GPT2LMHeadModel, tmp_path, pool)
    with farpool.paged(pool), pytest.raises(UnsupportedError, match=r"pytorch_model.bin.*save_pretrained"):
        GPT2LMHeadModel.from_pretrained(tmp_path)


def test_other_classes_are_refused(tmp_path: Path, pool: Pool) -> None:
    for kind, message in ((nn.Linear, "the class Linear"), (gpt2(), "a GPT2LMHeadModel"), ("bert", "a str")):
        with pytest.raises(ArgumentError, match=message):
            farpool.from_pretrained(kind, tmp_path, pool)
    with pytest.raises(ArgumentError, match="the pool is a PosixPath"):
        farpool.from_pretrained(GPT2LMHeadModel, pool, tmp_path)  # type: ignore[arg-type]


def test_a_class_that_loads_in_its_own_way_is_refused(tmp_path: Path, pool: Pool) -> None:
    class Own(GPT2LMHeadModel):
        @classmethod
        def from_pretrained(cls, *args: Any, **options: Any) -> Any:
            return gpt2()

    with pytest.raises(UnsupportedError, match=r"Own.from_pretrained.*farpool.offload"):
        farpool.from_pretrained(Own, tmp_path, pool)


def test_a_pool_without_room_for_what_is_converted_is_left_as_it_was(folders: Callable[[str], Path]) -> None:
    with Pool("64KiB", [Dram("64KiB")]) as pool:
        with pytest.raises(PoolFullError, match="lack"):
            farpool.from_pretrained(MixtralForCausalLM, folders("mixtral"), pool)
        gc.collect()
        assert pool.live == 0


def test_a_transformers_that_loads_otherwise_is_told(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    class PreTrainedModel:
        pass

    modeling = ModuleType("transformers.modeling_utils")
    modeling.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(pretrained.sys.modules, "transformers.modeling_utils", modeling)
    monkeypatch.setattr(pretrained, "_wrapped", False)
    with pytest.warns(FarpoolWarning, match=r"transformers 5\..*farpool.offload"), farpool.paged(pool):
        pass
