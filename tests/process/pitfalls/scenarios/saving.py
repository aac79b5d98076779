"""State dicts, copies, pickles, text."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool
from tests.process.pitfalls.compare import assert_usable, plain, randn, refused, same, state_of, twin
from tests.process.pitfalls.harness import scenario


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 24, bias=False), nn.Linear(24, 12))
    network[3].weight = nn.Parameter(torch.randn(12, 24).half())
    return network


@scenario(each={"copying": False, "assigning": True})
def state_goes_from_paged_to_plain_and_back(pool: Pool, assign: bool) -> None:
    source = farpool.offload(model(1), pool)
    target = model(2)
    assert str(target.load_state_dict(source.state_dict(), assign=assign)) == "<All keys matched successfully>"
    same(target.state_dict(), model(1).state_dict())
    if not assign:
        assert all(type(p) is nn.Parameter for p in target.parameters())
    back = farpool.offload(model(3), pool)
    back.load_state_dict(model(4).state_dict(), assign=assign)
    same(back.state_dict(), model(4).state_dict())
    both = farpool.offload(model(5), pool)
    both.load_state_dict(source.state_dict(), assign=assign)
    same(both.state_dict(), model(1).state_dict())
    if assign:
        assert all(type(p) is PagedTensor and isinstance(p, nn.Parameter) for p in both.parameters())
    else:
        both[0].weight.data.zero_()
    same(source.state_dict(), model(1).state_dict())


@scenario()
def assigned_paged_weights_train_to_the_same_bits(pool: Pool) -> None:
    def train(module: nn.Module) -> Any:
        module.float()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(randn(4, 12)).sum().backward()
            optimizer.step()
        return state_of(module)

    expected = model(2)
    expected.load_state_dict(model(1).state_dict(), assign=True)
    with torch.device("meta"):
        empty = model(2)
    weights = {name: pool.from_tensor(value) for name, value in model(1).state_dict().items()}
    empty.load_state_dict(weights, assign=True)
    del weights
    same(train(empty), train(expected))
    assert all(type(p.grad) is PagedTensor for p in empty.parameters())


@scenario()
def a_strict_load_reports_what_torch_reports(pool: Pool) -> None:
    def errors(module: nn.Module) -> list[str]:
        found = []
        for change in (
            lambda s: s.pop("0.weight"),
            lambda s: s.update(extra=torch.zeros(3)),
            lambda s: s.update({"0.weight": torch.zeros(3, 3)}),
        ):
            state = collections.OrderedDict(model(1).state_dict())
            change(state)
            try:
                module.load_state_dict(state)
            except RuntimeError as error:
                found.append(str(error))
            found.append(str(module.load_state_dict({k: v for k, v in state.items() if k != "0.weight"}, strict=False)))
        return found

    twin(pool, model, errors)


@scenario()
def an_optimizer_saves_and_loads_its_state(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        module.float()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            module(randn(4, 12)).sum().backward()
            optimizer.step()

        step()
        stream = io.BytesIO()
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, stream)
        kept = copy.deepcopy(optimizer.state_dict())
        step()
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step()
        return kept["state"], optimizer.state_dict()["state"]

    twin(pool, model, program)


@scenario()
def deepcopy_of_a_module_is_independent_and_paged(pool: Pool) -> None:
    module = farpool.offload(model(1), pool)
    module[0](randn(2, 12)).sum().backward()
    module[0].tied = module[0].weight
    twin_module = copy.deepcopy(module)
    assert all(type(p) is PagedTensor and isinstance(p, nn.Parameter) for p in twin_module.parameters())
    assert twin_module[0].tied is twin_module[0].weight
    same(twin_module.state_dict(), module.state_dict())
    with torch.no_grad():
        for parameter in twin_module.parameters():
            parameter.zero_()
    expected = model(1)
    expected[0].tied = expected[0].weight
    same(module.state_dict(), expected.state_dict())
    twin_module[0](randn(2, 12)).sum().backward()
    assert type(twin_module[0].weight.grad) is PagedTensor
    pool.materialize(module[0].weight.grad)


@scenario()
def deepcopy_of_an_optimizer_and_its_model_trains_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        module.float()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        pair = {"m": module, "o": optimizer}
        for _ in range(3):
            pair["o"].zero_grad()
            pair["m"](randn(4, 12)).sum().backward()
            pair["o"].step()
            pair = copy.deepcopy(pair)
        return pair["m"].state_dict(), pair["o"].state_dict()["state"]

    twin(pool, model, program)


@scenario()
def a_shallow_copy_means_what_it_means_in_torch(pool: Pool) -> None:
    tensor = pool.from_tensor(randn(4, 3))
    shallow = copy.copy(tensor)
    same(shallow, randn(4, 3))
    module = farpool.offload(model(), pool)
    other = copy.copy(module)
    assert other[0].weight is module[0].weight
    parameter = copy.copy(module[0].weight)
    same(plain(parameter), plain(module[0].weight))
    assert_usable(pool)


@scenario()
def deepcopy_of_a_tensor_keeps_what_torch_keeps(pool: Pool) -> None:
    def program(tensor: torch.Tensor) -> Any:
        tensor.tag = {"a": [1]}
        (tensor * 2).sum().backward()
        view = tensor.detach()[1:]
        copies = copy.deepcopy([tensor, view])
        copies[1].fill_(3)
        try:
            copy.deepcopy(tensor * 2 if type(tensor) is torch.Tensor else tensor[1:])
        except RuntimeError:
            copies.append("refused")
        return copies, copies[0].tag, copies[0].grad, copies[0].is_leaf

    twin(pool, lambda: randn(4, 3).requires_grad_(), program)


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(6, 4))
        self.alias = self.weight
        self.register_buffer("z", randn(4, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("none", torch.empty(0, 3))


@scenario(each={"pickle": "pickle", "torch.save": "save"})
def what_is_saved_loads_as_plain_tensors(pool: Pool, how: str) -> None:
    module = farpool.offload(model(1), pool)
    values = {"state": module.state_dict(), "view": pool.from_tensor(randn(6, 6))[1:, ::2].t(), "grad": None}
    module[0](randn(2, 12)).sum().backward()
    values["parameter"], values["grad"] = module[0].weight, module[0].weight.grad
    stream = io.BytesIO()
    if how == "pickle":
        pickle.dump(values, stream)
        loaded = pickle.loads(stream.getvalue())
    else:
        torch.save(values, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)
    assert type(loaded["parameter"]) is nn.Parameter
    assert type(loaded["grad"]) is torch.Tensor
    assert all(type(value) is torch.Tensor for value in loaded["state"].values())
    same(loaded, values)


LOADER = """
import sys
sys.modules["farpool"] = None
import torch
loaded = torch.load(sys.argv[1], weights_only=sys.argv[2] == "True")
loaded = loaded if isinstance(loaded, dict) else loaded.state_dict()
for name, value in loaded.items():
    assert type(value).__module__.startswith("torch"), type(value)
    print(name, type(value).__name__, value.dtype, tuple(value.shape), value.double().sum().item())
"""


@scenario(each={"a state dict": True, "a whole module": False})
def what_is_saved_loads_in_a_process_without_farpool(pool: Pool, weights_only: bool) -> None:
    network = nn.Sequential(nn.Linear(12, 24), nn.LSTM(24, 8), nn.BatchNorm1d(8))
    outputs = []
    for value in (network, farpool.offload(copy.deepcopy(network), pool)):
        path = Path("saved.pt").absolute()
        torch.save(value.state_dict() if weights_only else value, path)
        done = subprocess.run(
            [sys.executable, "-c", LOADER, str(path), str(weights_only)],
            capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


@scenario()
def safetensors_saves_paged_weights_and_loads_them_back(pool: Pool) -> None:
    from safetensors.torch import save_file

    module = farpool.offload(model(1), pool)
    path, plain_path = Path("weights.safetensors").absolute(), Path("plain.safetensors").absolute()
    save_file(module.state_dict(), path)
    save_file(model(1).state_dict(), plain_path)
    assert path.read_bytes() == plain_path.read_bytes()
    weights = farpool.load_safetensors(path, pool)
    target = farpool.offload(model(2), pool)
    target.load_state_dict(weights)
    same(target.state_dict(), model(1).state_dict())
    again = model(3)
    again.load_state_dict(weights, assign=True)
    del weights
    with torch.no_grad():
        again[0].weight.add_(1)
    same(plain(again[0].weight), model(1)[0].weight.detach() + 1)


TEXTS: dict[str, Any] = {
    "small": lambda: randn(3, 2),
    "scalar": lambda: randn(1)[0],
    "empty": lambda: torch.empty(0, 4),
    "bool": lambda: randn(3) > 0,
    "int": lambda: torch.arange(5),
    "complex": lambda: randn(3, dtype=torch.complex64),
    "conjugate": lambda: randn(3, dtype=torch.complex64).conj(),
    "half": lambda: randn(3).half(),
    "brain": lambda: randn(3).bfloat16(),
    "double": lambda: randn(3).double(),
    "not finite": lambda: torch.tensor([float("nan"), float("inf"), 1.0]),
    "large": lambda: randn(300, 300),
    "many dimensions": lambda: randn(2, 3, 2, 2),
    "with history": lambda: randn(3).requires_grad_(),
}


@scenario()
def text_shows_the_values_that_torch_shows(pool: Pool) -> None:
    for name, make in TEXTS.items():
        tensor, paged = make(), pool.from_tensor(make()).requires_grad_(make().requires_grad)
        for form in (repr, str, "{}".format, lambda t: f"{t}"):
            shown, expected = form(paged), form(tensor)
            if tensor.dim() == 0 and form not in (repr, str):
                assert shown == expected, (name, shown, expected)
                continue
            assert "farpool" in shown, (name, shown)
            words, wanted = _words(shown), _words(expected)
            assert words[: len(wanted)] == wanted, f"{name}: {shown} instead of {expected}"
        with torch.no_grad():
            repr(paged[..., None].expand(*paged.shape, 2))


def _words(text: str) -> list[str]:
    return (
        text.split("requires_grad")[0]
        .split("farpool")[0]
        .split("dtype")[0]
        .replace("PagedTensor", "tensor")
        .rstrip(", )\n")
        .replace("(", " ")
        .replace(",", " ")
        .split()[:10]
    )


@scenario(fast="16KiB")
def text_of_a_tensor_larger_than_the_budget_reads_only_its_edges(pool: Pool) -> None:
    tensor = pool.from_tensor(randn(400, 100))
    before = sum(link.nbytes for link in pool.stats().links)
    text = repr(tensor)
    moved = sum(link.nbytes for link in pool.stats().links) - before
    assert "..." in text
    assert f"{tensor[0, 0].item():.4f}" in text
    assert f"{tensor[-1, -1].item():.4f}" in text
    assert moved < 4 * pool.fast, f"{moved} bytes were moved for the text of a tensor of {tensor.nbytes} bytes"
    assert "farpool" in str(tensor.t())
    assert "Parameter" in repr(nn.Parameter(tensor))
    assert "Tensor" in repr([tensor, {"a": tensor}])


@scenario()
def modules_and_parameters_can_be_printed(pool: Pool) -> None:
    network = nn.Sequential(nn.Linear(12, 24), nn.Embedding(5, 4), nn.LSTM(3, 4))
    expected = repr(network)
    farpool.offload(network, pool)
    assert repr(network) == expected
    text = repr(network[0].weight)
    assert text.startswith("Parameter containing:\n")
    assert "requires_grad=True" in text
    assert "0.weight" in text
    assert "grad_fn" in repr(network[0].weight[1:])
    assert repr(nn.ParameterList(network[0].parameters()))
    assert f"{network[0].bias[0]:.3f}"
    with refused(pool, TypeError):
        format(network[0].weight, ".3f")
