"""Files of paged tensors: equal to those of plain ones, written piece by piece; and what a storage tells of itself."""

from __future__ import annotations

import io
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save, save_file, save_model
from torch import nn

import farpool
from farpool import PagedTensor, Pool, UnsupportedError
from farpool.tensors import paged_storage
from farpool.tensors.factories import from_tensor
from farpool.tensors.imports import replace, when_imported
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool


class Model(nn.Module):
    """Ties, views, lazy bits, types of both pickled forms, an empty tensor, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.second = nn.Linear(16, 24, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.note = {"a": [1]}
        self.register_buffer("whole", torch.randn(16, 16))
        self.register_buffer("part", self.whole.detach()[4:, ::2].t())
        self.register_buffer("conjugate", torch.randn(5, dtype=torch.complex64).conj().detach())
        self.register_buffer("unsigned", torch.arange(8).to(torch.uint16))
        self.register_buffer("brain", torch.randn(7).bfloat16())
        self.register_buffer("none", torch.empty(0, 3))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# -- torch.save -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [lambda m: m.state_dict(), lambda m: m], ids=["state dict", "module"])
def test_torch_save_writes_the_file_of_the_plain_model(take: Callable[[nn.Module], Any], evil: EvilPool) -> None:
    assert saved(take(farpool.offload(make(), evil))) == saved(take(make()))


def test_ties_and_views_load_as_ties_and_views(evil: EvilPool) -> None:
    loaded = torch.load(io.BytesIO(saved(farpool.offload(make(), evil).state_dict())), weights_only=True)
    assert_same(list(loaded.values()), list(make().state_dict().values()))
    for left, right in (("first.weight", "second.weight"), ("whole", "part")):
        assert loaded[left].untyped_storage()._cdata == loaded[right].untyped_storage()._cdata


def test_optimizer_and_gradients_are_saved_as_plain_ones(evil: EvilPool) -> None:
    states = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(8, 8)
        if paged:
            farpool.offload(module, evil)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        states.append(saved([optimizer.state_dict(), module.weight.grad]))
    assert states[0] == states[1]


def test_the_old_format_is_written_too(evil: EvilPool) -> None:
    tensor, file = torch.randn(4, 5), io.BytesIO()
    paged = from_tensor(evil, tensor)
    torch.save([paged, paged[1:]], file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), [tensor, tensor[1:]])


def test_one_storage_under_two_types_is_refused_as_by_torch(evil: EvilPool) -> None:
    tensor = torch.zeros(4)
    for value in (tensor, from_tensor(evil, tensor)):
        with pytest.raises(RuntimeError, match="view the same data as different types"):
            saved([value, value.view(torch.int32)])


def test_torch_save_holds_one_storage_at_a_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    most = []

    def counted(tensor: PagedTensor) -> torch.Tensor:
        plain = original(tensor)
        alive.append(plain.nbytes)
        most.append(sum(alive))
        weakref.finalize(plain.untyped_storage(), alive.remove, plain.nbytes)
        return plain

    original = paged_storage.to_cpu
    monkeypatch.setattr(paged_storage, "to_cpu", counted)
    module = farpool.offload(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)]), pool)
    saved(module.state_dict())
    assert len(most) == 16
    assert max(most) == 64 * 64 * 4
    assert not alive


def test_plain_tensors_are_saved_as_before() -> None:
    tensor = torch.arange(6.0)
    assert_same(torch.load(io.BytesIO(saved({"a": tensor, "b": tensor[2:]})), weights_only=True)["b"], tensor[2:])


# -- safetensors ------------------------------------------------------------------------------------------------------

DTYPES = [dtype for dtype in safetensors.torch._TYPES.values() if dtype is not None]


def values() -> dict[str, torch.Tensor]:
    """All types, names that need escapes, shapes with and without elements."""
    torch.manual_seed(0)
    tensors = {
        f"{'äz'[number % 2]}/{number}": torch.randint(0, 2, (number + 1, 8), dtype=torch.uint8)
        .view(torch.uint8)
        .to(dtype)
        for number, dtype in enumerate(DTYPES)
    }
    return {**tensors, 'quote"\n\x1f': torch.randn(()), "none": torch.empty(0, 3), "large": torch.randn(60, 80)}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"ключ": 'a"\\b'}], ids=["none", "format", "escaped"])
def test_save_file_writes_the_file_of_plain_tensors(
    metadata: dict[str, str] | None, tmp_path: Path, pool: Pool
) -> None:
    save_file(values(), tmp_path / "plain", metadata)
    paged: dict[str, torch.Tensor] = {name: pool.from_tensor(tensor) for name, tensor in values().items()}
    save_file(paged, tmp_path / "paged", metadata=metadata)
    assert (tmp_path / "paged").read_bytes() == (tmp_path / "plain").read_bytes()
    paged["large"] = values()["large"]
    save_file(paged, str(tmp_path / "mixed"), metadata)
    assert (tmp_path / "mixed").read_bytes() == (tmp_path / "plain").read_bytes()
    assert save(paged, metadata) == (tmp_path / "plain").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far.pool", "mixed", "paged", "plain"]


def test_save_model_keeps_one_of_tied_weights_as_for_the_plain_model(tmp_path: Path, evil: EvilPool) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
        model[1].weight = model[0].weight
        return model.to(memory_format=torch.contiguous_format)

    save_model(tied(), str(tmp_path / "plain"))
    save_model(farpool.offload(tied(), evil), str(tmp_path / "paged"))
    assert (tmp_path / "paged").read_bytes() == (tmp_path / "plain").read_bytes()
    target = farpool.offload(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)), evil)
    target[1].weight = target[0].weight
    assert safetensors.torch.load_model(target, tmp_path / "paged") == (set(), [])
    assert_same(list(target.state_dict().values()), list(tied().state_dict().values()))


def test_views_are_told_apart_as_plain_ones_are(tmp_path: Path, evil: EvilPool) -> None:
    plain = torch.arange(12.0).view(3, 4)
    for whole in (plain, from_tensor(evil, plain)):
        save_file({"a": whole[:1], "b": whole[1:]}, tmp_path / f"{type(whole).__name__}.disjoint")
        with pytest.raises(RuntimeError, match="share memory"):
            save_file({"a": whole, "b": whole[1:]}, tmp_path / "overlapping")
        with pytest.raises(ValueError, match="non contiguous"):
            save_file({"a": whole.t()}, tmp_path / "transposed")
        module = nn.Module()
        module.register_buffer("a", whole[:2].detach())
        module.register_buffer("b", whole[1:].detach())
        with pytest.raises(RuntimeError, match="None is covering the entire storage"):
            save_model(module, str(tmp_path / "incomplete"))
    left, right = sorted(tmp_path.iterdir())
    assert left.read_bytes() == right.read_bytes()


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path: Path, evil: EvilPool) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    tensors = {"a": from_tensor(evil, torch.randn(4)), "b": from_tensor(evil, torch.randn(4))}
    evil.closed = True
    with pytest.raises(farpool.PoolClosedError):
        save_file(tensors, path)
    assert [path.read_bytes()] == [p.read_bytes() for p in tmp_path.iterdir()]


def test_weights_are_saved_over_the_file_that_they_come_from(tmp_path: Path, pool: Pool) -> None:
    path = tmp_path / "weights.safetensors"
    expected = {f"w{number}": torch.randn(64, 64) for number in range(40)}
    save_file(expected, path)
    weights = farpool.load_safetensors(path, pool)
    weights["w3"].add_(1)
    save_file(dict(weights), path)
    expected["w3"] += 1
    found = load_file(path)
    for name, tensor in expected.items():
        assert_same(weights[name], tensor, name)
        assert_same(found[name], tensor, name)


# -- what a storage tells ---------------------------------------------------------------------------------------------


def test_views_share_a_storage_and_others_do_not(evil: EvilPool) -> None:
    first, second = from_tensor(evil, torch.randn(6, 4)), from_tensor(evil, torch.randn(6, 4))
    storage = first.untyped_storage()
    assert storage is first[2:].t().untyped_storage()
    assert storage is not second.untyped_storage()
    assert storage.nbytes() == storage.size() == len(storage) == 6 * 4 * 4
    assert storage.device == torch.device("cpu")
    assert torch.is_storage(storage)
    identity = storage._cdata
    del storage
    first.add_(1)
    assert first.untyped_storage()._cdata == identity != second.untyped_storage()._cdata
    first.data = second
    assert first.untyped_storage() is second.untyped_storage()


def test_a_storage_gives_no_address_and_takes_no_bytes(evil: EvilPool) -> None:
    paged = from_tensor(evil, torch.ones(3))
    storage = paged.untyped_storage()
    uses: list[Callable[[], Any]] = [
        paged.data_ptr,
        storage.data_ptr,
        storage.tolist,
        storage.share_memory_,
        storage.pin_memory,
        lambda: storage[0],
        lambda: storage.__setitem__(0, 1),
        lambda: storage.fill_(0),
        lambda: storage.resize_(0),
        lambda: storage.copy_(torch.zeros(3).untyped_storage()),
        lambda: torch.zeros(3).set_(storage, 0, (3,)),
        lambda: paged.set_(storage),
        lambda: saved(storage),
    ]
    for use in uses:
        with pytest.raises(UnsupportedError, match=r"materialize|copy_"):
            use()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(3).untyped_storage().copy_(storage)
    with pytest.raises(RuntimeError):
        torch.FloatTensor(storage)
    assert_same(paged, torch.ones(3))


def test_cpu_is_a_plain_copy_with_history(evil: EvilPool) -> None:
    plain = torch.randn(3, 4, requires_grad=True)
    paged = from_tensor(evil, plain).requires_grad_()
    copied = paged.cpu()
    assert type(copied) is torch.Tensor
    with torch.no_grad():
        paged.add_(1)
    assert_same(copied, plain)
    (copied * 3).sum().backward()
    assert_same(paged.grad, torch.full((3, 4), 3.0))
    array = paged.detach().cpu().numpy()
    array[:] = 0
    assert_same(paged, plain.detach() + 1)
    assert (paged.detach().numpy(force=True) == (plain.detach() + 1).numpy()).all()


# -- modules that are imported later ----------------------------------------------------------------------------------


def test_a_function_is_replaced_where_it_was_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    maker, user = ModuleType("a_maker"), ModuleType("a_user")
    exec("def answer(): return 1", vars(maker))
    vars(user)["renamed"] = vars(maker)["answer"]
    vars(user)["answer"] = vars(maker)["answer"]
    monkeypatch.setitem(sys.modules, "a_maker", maker)
    monkeypatch.setitem(sys.modules, "a_user", user)
    replace(maker, "absent", lambda original: None)
    replace(user, "answer", lambda original: lambda: 3)
    replace(maker, "answer", lambda original: lambda: original() + 1)
    assert [vars(maker)["answer"](), vars(user)["renamed"](), vars(user)["answer"]()] == [2, 2, 2]


def test_a_module_is_changed_when_it_has_been_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("import os\nvalue = int(os.environ['LATER'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    when_imported("imported_later", lambda module: found.append(module.value))
    monkeypatch.delenv("LATER", raising=False)
    with pytest.raises(KeyError):
        import imported_later
    monkeypatch.setenv("LATER", "7")
    import imported_later

    assert found == [imported_later.value] == [7]
    when_imported("imported_later", found.append)
    assert found[1] is sys.modules.pop("imported_later")
