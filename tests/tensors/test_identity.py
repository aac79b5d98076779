"""What a paged tensor is to the program: raw memory refused by name, rebinding, copying, pickling, printing."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool, UnsupportedError
from farpool.tensors.factories import from_tensor, materialize, zeros
from tests.tensors.bits import assert_same, tensors_of
from tests.tensors.evil_pool import EvilPool

VALUES = torch.arange(12.0).view(3, 4)

RAW: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "numpy": lambda t: t.numpy(),
    "asarray": lambda t: np.asarray(t),
    "ufunc": lambda t: np.add(t, 1),
    "dlpack": lambda t: torch.from_dlpack(t),
    "dlpack method": lambda t: t.__dlpack__(),
    "dlpack device": lambda t: t.__dlpack_device__(),
    "data_ptr of a storage": lambda t: t.untyped_storage().data_ptr(),
    "bytes of a storage": lambda t: t.untyped_storage()[0],
    "writing to a storage": lambda t: t.untyped_storage().fill_(0),
    "storage": lambda t: t.storage(),
    "share_memory_": lambda t: t.share_memory_(),
    "is_shared": lambda t: t.is_shared(),
    "pin_memory": lambda t: t.pin_memory(),
    "shared for a process": lambda t: torch.multiprocessing.reductions.reduce_tensor(t),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_memory_is_refused_and_the_way_out_is_named(name: str, evil: EvilPool) -> None:
    with pytest.raises(UnsupportedError, match=r"pool\.materialize\(t\)"):
        RAW[name](from_tensor(evil, VALUES))


def test_native_code_that_asks_for_an_address_gets_an_error(evil: EvilPool) -> None:
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(from_tensor(evil, VALUES))


def test_a_parameter_is_named_in_the_error(evil: EvilPool) -> None:
    module = farpool.offload(nn.Sequential(nn.Linear(3, 3)), evil)
    with pytest.raises(UnsupportedError, match=r"'0\.weight' \[3, 3\]"):
        module[0].weight.data_ptr()


def test_no_tensor_takes_over_the_memory_of_another(evil: EvilPool) -> None:
    tensor, plain = from_tensor(evil, VALUES), torch.zeros(3, 4)
    for function in (
        lambda: plain.set_(tensor),
        lambda: tensor.set_(plain),
        lambda: tensor.set_(plain.untyped_storage()),
        lambda: tensor.set_(),
        lambda: setattr(plain, "data", tensor),
        lambda: setattr(nn.Parameter(plain), "data", tensor),
        lambda: tensor.resize_(24),
        lambda: tensor.resize_(2),
        lambda: tensor.resize_as_(torch.zeros(5)),
    ):
        with pytest.raises(UnsupportedError):
            function()
    assert tensor.resize_(3, 4) is tensor
    assert torch.zeros(1).resize_as_(tensor).shape == (3, 4)
    assert_same(tensor, VALUES)
    assert_same(plain, torch.zeros(3, 4))


def test_data_without_history_shares_the_bytes(evil: EvilPool) -> None:
    weight = from_tensor(evil, VALUES).requires_grad_()
    assert weight.data._storage is weight._storage
    assert not weight.data.requires_grad
    weight.data.add_(1)
    assert_same(weight, VALUES + 1)


def test_data_can_be_rebound_to_another_paged_tensor_or_a_copy_of_a_plain_one(evil: EvilPool) -> None:
    weight = from_tensor(evil, VALUES).requires_grad_()
    other = zeros(evil, 2, 2)
    weight.data = other
    assert weight._storage is other._storage
    assert weight.requires_grad
    weight.data = VALUES[:, :2]
    assert_same(weight, VALUES[:, :2])
    (weight * 2).sum().backward()
    assert_same(weight.grad, torch.full((3, 2), 2.0))


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16", "float"])
def test_a_module_is_converted_in_the_pool(convert: str, evil: EvilPool) -> None:
    plain, paged = make(), farpool.offload(make(), evil)
    weight = paged[0].weight
    for module in (plain, paged):
        module(torch.ones(2, 4)).sum().backward()
        getattr(module, convert)()
    assert paged[0].weight is weight
    for (name, left), right in zip(paged.named_parameters(), plain.parameters(), strict=True):
        assert type(left) is PagedTensor, name
        assert_same(left, right, name)
        assert_same(left.grad, right.grad, name)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))


def test_a_move_to_another_device_is_refused_and_one_to_its_own_does_nothing(evil: EvilPool) -> None:
    module = farpool.offload(make(), evil)
    weight = module[0].weight
    assert module.to("cpu") is module
    assert module[0].weight is weight
    assert weight.to("cpu") is weight
    assert module.cpu() is module
    assert module[0].weight is weight
    assert type(weight) is PagedTensor
    with pytest.raises(UnsupportedError, match="cannot move to cuda"):
        torch.ops.aten._to_copy.default(weight, device=torch.device("cuda"))
    assert type(module[0].weight) is PagedTensor


TO_META: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda t: t.to("meta"),
    "to with a dtype": lambda t: t.to(torch.device("meta"), torch.float16),
    "to another tensor's device": lambda t: t.to(torch.empty(2, device="meta")),
    "to in another format": lambda t: t.to("meta", copy=True, memory_format=torch.contiguous_format),
    "transposed": lambda t: t.t().to("meta"),
    "column": lambda t: t[:, 0].to("meta"),
    "no rows": lambda t: t[:0].to("meta"),
    "detached": lambda t: t.detach().to("meta"),
    "empty_like": lambda t: torch.empty_like(t, device="meta"),
    "zeros_like": lambda t: torch.zeros_like(t, device="meta"),
    "rand_like": lambda t: torch.rand_like(t, device="meta"),
    "randint_like": lambda t: torch.randint_like(t, 5, device="meta"),
    "copy_": lambda t: torch.empty_like(t, device="meta").copy_(t),
}


@pytest.mark.parametrize("kind", TO_META)
def test_a_tensor_on_the_meta_device_is_plain_and_reads_nothing(kind: str, pool: Pool) -> None:
    plain = nn.Parameter(torch.ones(1024, 256))  # four times the budget
    module = farpool.offload(nn.ParameterList([nn.Parameter(plain.detach().clone())]), pool)
    before = pool.stats().accesses
    result, expected = TO_META[kind](module[0]), TO_META[kind](plain)
    assert pool.stats().accesses == before
    farpool.restore(module)
    assert type(result) is torch.Tensor
    assert result.is_meta
    for look in ("shape", "dtype", "requires_grad"):
        assert getattr(result, look) == getattr(expected, look), look
    assert (result.stride(), result.storage_offset()) == (expected.stride(), expected.storage_offset())


def test_modules_move_to_the_meta_device_and_leave_the_pool(evil: EvilPool) -> None:
    module = farpool.offload(make(), evil)
    for copied in (copy.deepcopy(module).to("meta"), copy.deepcopy(module).to_empty(device="meta")):
        assert all(tensor.is_meta and type(tensor) is not PagedTensor for tensor in tensors_of(copied).values())
    assert all(type(tensor) is PagedTensor for tensor in tensors_of(module).values())
    module.to("meta")
    assert all(tensor.is_meta and type(tensor) is not PagedTensor for tensor in tensors_of(module).values())


def test_a_deep_copy_is_a_paged_module_of_its_own(evil: EvilPool) -> None:
    module = make()
    module.tied = module[0].weight
    farpool.offload(module, evil)
    twin = copy.deepcopy(module)
    assert twin.tied is twin[0].weight
    assert isinstance(twin.tied, nn.Parameter)
    assert twin.tied._storage is not module.tied._storage
    with torch.no_grad():
        twin.tied.add_(1)
    assert_same(module.tied, make()[0].weight)
    twin(torch.ones(2, 4)).sum().backward()
    assert type(twin.tied.grad) is PagedTensor
    assert module.tied.grad is None


def test_a_shallow_copy_views_the_same_bytes(evil: EvilPool) -> None:
    for parameter in (nn.Parameter(VALUES.clone()), nn.Parameter(from_tensor(evil, VALUES))):
        twin = copy.copy(parameter)
        assert isinstance(twin, nn.Parameter)
        assert twin.requires_grad
        with torch.no_grad():
            twin.add_(1)
        assert_same(parameter, VALUES + 1)


def test_a_deep_copy_of_aliases_keeps_them_aliased(evil: EvilPool) -> None:
    base = from_tensor(evil, VALUES)
    first, second = copy.deepcopy([base[:2], base[1:]])
    first[1].zero_()
    assert_same(second[0], torch.zeros(4))
    assert_same(base, VALUES)


def test_a_deep_copy_of_a_leaf_has_gradient_and_attributes_as_in_torch(evil: EvilPool) -> None:
    for make_leaf in (lambda: VALUES.clone(), lambda: from_tensor(evil, VALUES)):
        leaf = make_leaf().requires_grad_()
        leaf.note = {"a": 1}
        (leaf * 3).sum().backward()
        twin = copy.deepcopy(leaf)
        assert twin.requires_grad
        assert twin.note == {"a": 1}
        assert_same(twin.grad, torch.full((3, 4), 3.0))
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(leaf * 1 if type(leaf) is torch.Tensor else leaf.t())


def test_a_parameter_stays_one_through_detach_and_back(evil: EvilPool) -> None:
    parameter = nn.Parameter(from_tensor(evil, VALUES))
    assert type(parameter) is PagedTensor
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert not isinstance(parameter.detach(), nn.Parameter)
    module = nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter


@pytest.mark.slow
def test_what_is_saved_loads_where_farpool_is_not_installed(evil: EvilPool, tmp_path: Path) -> None:
    module = farpool.offload(make(), evil)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "p": module[0].weight}, path)
    script = (
        "import sys, torch\n"
        "sys.modules['farpool'] = None\n"
        f"saved = torch.load({str(path)!r}, weights_only=True)\n"
        "assert all(type(value) is torch.Tensor for value in saved['model'].values())\n"
        "assert type(saved['p']) is torch.nn.Parameter\n"
        "assert type(saved['optimizer']['state'][0]['exp_avg']) is torch.Tensor\n"
        "print(saved['model']['0.weight'].double().sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == materialize(module[0].weight).double().sum().item()
    plain = make()
    plain.load_state_dict(torch.load(path)["model"])
    module.load_state_dict(torch.load(path)["model"])
    assert_same(module[0].weight, plain[0].weight)


def test_a_pickle_is_plain(evil: EvilPool) -> None:
    tensor = from_tensor(evil, VALUES)
    tensor.note = 7
    again = pickle.loads(pickle.dumps(tensor))
    assert type(again) is torch.Tensor
    assert again.note == 7
    assert_same(again, VALUES)
    with pytest.raises(RuntimeError, match="graph leaves"):
        pickle.dumps(nn.Parameter(tensor).t())


def _total(tensor: torch.Tensor) -> tuple[str, float]:
    return type(tensor).__name__, tensor.sum().item()


@pytest.mark.slow
def test_another_process_receives_a_plain_tensor(evil: EvilPool) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        assert workers.apply_async(_total, (from_tensor(evil, VALUES),)).get(timeout=100) == ("Tensor", 66.0)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index] * 2


@pytest.mark.slow
def test_data_loader_workers_read_a_paged_dataset_as_plain(evil: EvilPool) -> None:
    loader = torch.utils.data.DataLoader(
        Rows(from_tensor(evil, VALUES)), batch_size=2, num_workers=1, multiprocessing_context="spawn", timeout=100
    )
    assert_same(torch.cat(list(loader)), VALUES * 2)


def test_the_text_shows_values_name_and_history(pool: Pool) -> None:
    module = farpool.offload(make(), pool)
    text = repr(module[0].bias)
    assert text.startswith("Parameter containing:\nPagedTensor([")
    assert text.endswith("farpool='0.bias', requires_grad=True)")
    assert repr(pool.from_tensor(VALUES)) == (
        "PagedTensor([[ 0.,  1.,  2.,  3.],\n"
        "             [ 4.,  5.,  6.,  7.],\n"
        "             [ 8.,  9., 10., 11.]], farpool='weights')"
    )
    assert "grad_fn=<PermuteBackward0>" in repr(module[0].weight.permute(1, 0))
    assert str(pool.from_tensor(torch.ones(0))) == "PagedTensor([], farpool='weights')"
    assert f"{pool.from_tensor(torch.tensor(1.5)):.3f}" == "1.500"
    assert f"{pool.from_tensor(torch.ones(1))}" == "PagedTensor([1.], farpool='weights')"


def test_a_sparse_or_quantized_tensor_cannot_enter_a_pool(evil: EvilPool) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnsupportedError):
            from_tensor(evil, tensor)
