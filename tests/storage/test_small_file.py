"""`save`, `load`, `inspect`: every bit comes back, rounding is reported, claims say what they are about."""

from __future__ import annotations

import copy
import math
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from numpy.typing import NDArray
from odd_network import network, with_masks
from safetensors import safe_open
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError, OptionError
from sipp.results.saved_file import entropy_bytes
from sipp.storage.coding import decode_positions, encode_positions

EXACT = ("fp32", "lossless")
LOSSY = ("fp16", "bf16", "int8")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.sipp.safetensors"


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert {name: (t.shape, t.dtype) for name, t in one.items()} == {
        name: (t.shape, t.dtype) for name, t in other.items()
    }
    return all(bits(tensor) == bits(other[name]) for name, tensor in one.items())


class Bag(nn.Module):
    """A module that holds one parameter and one buffer."""

    def __init__(self, weight: Tensor, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.register_buffer("buffer", torch.arange(3) if buffer is None else buffer.clone())


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 10))


# --- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", EXACT)
def test_every_bit_of_every_entry_comes_back(path: Path, values: str) -> None:
    net, masks = network()
    saved = sipp.save(with_masks(net, masks), path, values=values)  # type: ignore[arg-type]
    state = sipp.load(path)
    assert same_bits(state, net.state_dict()) and state["tied"] is state["2.weight"]
    found = sipp.inspect(path)
    assert found.masks.keys() == masks.keys() and all(torch.equal(found.masks[name], masks[name]) for name in masks)
    assert found.n_bytes == saved.n_bytes == path.stat().st_size and found.sha256 == saved.sha256
    assert found.tensors == saved.tensors and str(found) == str(saved)
    other, _ = network()
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    assert sipp.load(path, into=other) is other
    assert same_bits(other.state_dict(), net.state_dict())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.lists(st.integers(0, 7), min_size=0, max_size=4),
    st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]),
    st.sampled_from(EXACT),
    st.integers(0, 2**31),
)
def test_random_bits_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: list[int], keep: float, values: str, seed: int
) -> None:
    """NaNs with any payload, infinities, subnormal numbers, -0.0; a mask that keeps zeros and drops -0.0."""
    generator = torch.Generator().manual_seed(seed)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limit = 2 ** (8 * dtype.itemsize - 1) - 1
    numbers = torch.randint(-limit, limit, shape, generator=generator, dtype=torch.int64).to(integer)
    mask = torch.rand(shape, generator=generator) < keep
    numbers = torch.where(mask, numbers, 0)
    numbers[mask & (torch.rand(shape, generator=generator) < 0.2)] = 0
    numbers[~mask & (torch.rand(shape, generator=generator) < 0.3)] = -limit - 1  # -0.0
    path = tmp_path / "bits"
    given_masks = {"weight": mask} if seed % 2 else None
    bag = Bag(numbers.view(dtype))
    sipp.save(with_masks(bag, given_masks) if given_masks else bag, path, values=values)  # type: ignore[arg-type]
    assert bits(sipp.load(path)["weight"]) == bits(numbers)
    if given_masks:
        assert torch.equal(sipp.inspect(path).masks["weight"], mask)


def test_a_pruned_record_keeps_what_was_said_of_it(path: Path) -> None:
    pruned = sipp.prune(mlp(), torch.rand(64, 30), keep=0.2, holdout=torch.rand(64, 30))
    sipp.save(pruned, path)
    found = sipp.inspect(path)
    assert not found.rounding_words and f"{pruned.kept:,} of" in str(found)
    for name in ("bound", "guarantee", "measured", "choice", "moved", "described_hash"):
        assert getattr(found.pruned, name) == getattr(pruned, name) is not None
    assert [layer.bound for layer in found.pruned.layers] == [layer.bound for layer in pruned.layers]
    assert pruned.seen.hashes and not found.pruned.seen.hashes and not found.pruned.seen.is_all  # in no small file
    assert all(torch.equal(found.masks[name], mask) for name, mask in pruned.masks.items())
    assert found.model.endswith("Sequential") and found.torch == str(torch.__version__)
    assert pruned.method in str(found) and "before its values were rounded" not in str(found)
    assert same_bits(sipp.load(path), pruned.model.state_dict())


def test_it_is_a_safetensors_file_and_the_same_network_gives_the_same_file(path: Path) -> None:
    net, masks = network()
    sipp.save(with_masks(net, masks), path)
    before = path.read_bytes()
    sipp.save(with_masks(net, masks), path)
    assert path.read_bytes() == before
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["data", "index"] and "sha256" in file.metadata()["sipp file"]


def test_the_cheapest_encoding_is_taken(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 200, generator=generator)
    for keep, kind in ((1.0, "all"), (0.5, "bitmask"), (0.1, "gaps")):
        kept = torch.where(torch.rand(200, 200, generator=generator) < keep, weight, 0.0)
        one = sipp.save(Bag(kept), path).tensors[0]
        n_kept = int((kept != 0).sum())
        assert one.positions == kind and one.kept == n_kept
        assert one.n_bytes <= 1.05 * entropy_bytes(40_000, n_kept) + 4 * n_kept
    weight[0, 0] = 0
    assert sipp.save(Bag(weight), path).tensors[0].positions == "all"  # one zero is cheaper as a number
    masked = sipp.save(with_masks(Bag(weight), {"weight": weight != 0}), path)
    assert masked.masks["weight"].sum() == 39_999


def test_lossless_codes_exponents(path: Path) -> None:
    net = Bag(torch.randn(300, 300))
    raw, coded = (sipp.save(net, path, values=values).n_bytes for values in EXACT)  # type: ignore[arg-type]
    assert coded < 0.86 * raw  # of 8 bits, an exponent of normal numbers holds 2.6


# --- lossy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", LOSSY)
def test_rounding_is_reported_and_rounding_twice_is_rounding_once(path: Path, values: str) -> None:
    pruned = sipp.prune(mlp(), None, keep=0.3, method="magnitude")
    saved = sipp.save(pruned, path, values=values)  # type: ignore[arg-type]
    net = sipp.load(path, into=mlp())
    for one in saved.tensors:
        given, back = (m.state_dict()[one.names[0]].double() for m in (pruned.model, net))
        change = (back - given).abs()
        if given.dim() < 2:
            assert one.values == "exact" and one.largest_change == 0 and bits(given) == bits(back)
            continue
        assert one.values == values and one.largest_change > 0
        assert one.largest_change == pytest.approx(float((change / given.abs())[given != 0].max()), rel=1e-12)
        assert one.norm_change == pytest.approx(float(change.norm() / given.norm()), rel=1e-12)
        if values == "int8":
            assert bool((change <= 0.5001 / 127 * given.abs().amax(1, keepdim=True)).all())
        else:
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[values]
            assert torch.equal(back, given.float().to(dtype).double())
    assert saved.rounding_words in " ".join(str(saved).split())
    again = sipp.save(with_masks(net, pruned.masks), path, values=values)  # type: ignore[arg-type]
    assert all(one.largest_change == 0 for one in again.tensors) and not again.rounding_words
    assert same_bits(sipp.load(path), net.state_dict())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31), st.integers(-120, 120), st.sampled_from(LOSSY))
@example(7, -3, "int8")
@example(0, -108, "int8")  # some rows become 0
@example(10, -139, "int8")  # subnormal numbers
def test_rounding_twice_is_rounding_once_at_any_scale(tmp_path: Path, seed: int, exponent: int, values: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 7, generator=generator, dtype=torch.float64) * 2.0**exponent
    if values == "fp16":
        weight = weight.clamp(-6e4, 6e4)
    path = tmp_path / "twice"
    sipp.save(Bag(weight.float()), path, values=values)  # type: ignore[arg-type]
    once = sipp.load(path)["weight"]
    saved = sipp.save(Bag(once), path, values=values)  # type: ignore[arg-type]
    assert torch.equal(sipp.load(path)["weight"], once) and saved.tensors[0].largest_change == 0


def test_the_largest_weight_of_a_row_gives_the_scale_of_int8_again() -> None:
    """For every significand of a float32."""
    largest = (np.arange(1 << 23, dtype=np.uint32) + np.uint32(127 << 23)).view(np.float32)
    scale = (largest.astype(np.float64) / 127).astype(np.float32)
    again = ((scale * np.float32(127)).astype(np.float64) / 127).astype(np.float32)
    assert np.array_equal(scale, again)


def test_a_kept_weight_that_becomes_zero_stays_in_the_mask(path: Path) -> None:
    weight = torch.tensor([[1.0, 1e-9, 0.0]])
    masks = {"weight": torch.tensor([[True, True, False]])}
    saved = sipp.save(with_masks(Bag(weight), masks), path, values="int8")
    assert sipp.load(path)["weight"].tolist() == [[pytest.approx(1.0, rel=2**-14), 0.0, 0.0]]
    assert saved.tensors[0].largest_change == 1.0
    assert sipp.inspect(path).masks["weight"].tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("value", "values"), [(float("nan"), "bf16"), (float("inf"), "int8"), (1e5, "fp16"), (3.4e38, "bf16")]
)
def test_values_that_a_format_cannot_hold_are_refused(path: Path, value: float, values: str) -> None:
    with pytest.raises(ModelError, match=r"weight: a .*weight is"):
        sipp.save(Bag(torch.tensor([[1.0, value]])), path, values=values)  # type: ignore[arg-type]
    assert not path.exists()


# --- certificates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8"])
def test_a_certificate_is_about_the_values_it_was_made_for(path: Path, values: str) -> None:
    dense, holdout = mlp(), torch.rand(100, 30)
    pruned = sipp.prune(dense, torch.rand(64, 30), keep=0.5)
    certificate = sipp.certify(dense, pruned.model, holdout)
    is_exact = values == "fp32"
    sipp.save(pruned, path, values=values, certificate=certificate)  # type: ignore[arg-type]
    found = sipp.inspect(path)
    assert found.certificate == certificate
    assert found.certificate_about == ("stored values" if is_exact else "values before rounding")
    assert ("before its values were rounded" in str(found)) is not is_exact
    stored = sipp.load(path, into=mlp())
    new = sipp.certify(dense, stored, holdout)
    assert sipp.save(stored, path, values=values, certificate=new).certificate_about == "stored values"  # type: ignore[arg-type]
    assert sipp.inspect(path).certificate_about == "stored values" and sipp.load(path)


# --- what cannot be saved or loaded ---------------------------------------------------------------------------------


def test_options_that_do_not_fit(path: Path) -> None:
    net = mlp()
    wrong: list[tuple[dict[str, object], str]] = [
        ({"values": "int4"}, "int4.*fp32"),
        ({"certificate": "text"}, "certificate must be a Certificate or AccuracyCertificate, not a str"),
    ]
    for options, words in wrong:
        with pytest.raises(OptionError, match=words):
            sipp.save(net, path, **options)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"0\.weight: a pruned weight is not zero"):
        sipp.save(with_masks(net, {"0.weight": torch.zeros(60, 30, dtype=torch.bool)}), path)
    with pytest.raises(OptionError, match=r"into must be an nn\.Module, not a dict"):
        sipp.load(path, into={})  # type: ignore[call-overload]
    assert not path.exists()


def test_models_that_cannot_be_saved(path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    for net, words in (
        (nn.LazyLinear(3), "weight: has no plain numbers"),
        (nn.Linear(2, 2, device="meta"), "weight: has no plain numbers"),
        (Extra(2, 2), "_extra_state: a dict"),
    ):
        with pytest.raises(ModelError, match=words):
            sipp.save(net, path)


def test_a_model_that_does_not_fit_is_named_and_left_as_it_was(path: Path) -> None:
    net = mlp()
    sipp.save(net, path)
    wide = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 11))
    deep = nn.Sequential(*mlp(1), nn.Linear(2, 2))
    short = nn.Sequential(nn.Linear(30, 60))
    for other, words in (
        (wide, r"2\.weight is float32 \[10, 60\] in the file, float32 \[11, 60\] in the model; 2\.bias"),
        (deep, r"3\.weight is absent in the file.*3\.bias is absent in the file"),
        (short, r"2\.weight is float32 .* absent in the model; 2\.bias"),
        (mlp(1).double(), r"0\.weight is float32 \[60, 30\] in the file, float64"),
        (mlp(1).to("meta"), "no plain numbers"),
        (nn.Sequential(nn.LazyLinear(60), nn.ReLU(), nn.Linear(60, 10)), "no plain numbers"),
    ):
        before = {name: value.clone() for name, value in other.state_dict().items() if not nn.parameter.is_lazy(value)}
        with pytest.raises(ModelError, match=words):
            sipp.load(path, into=other)
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in before.items() if not value.is_meta)


def test_a_tied_model_takes_no_two_different_tensors(path: Path) -> None:
    apart = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    sipp.save(apart, path)
    tied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(ModelError, match=r"a\.weight, b\.weight: one tensor in the model"):
        sipp.load(path, into=tied)
    before = sipp.save(tied, path)
    assert [one.names for one in before.tensors] == [("a.weight", "b.weight")]
    assert before.dense_bytes == 36
    sipp.load(path, into=apart)
    assert torch.equal(apart["a"].weight, tied["a"].weight) and torch.equal(apart["b"].weight, tied["a"].weight)


def test_a_network_comes_back_ready_to_use(path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    sipp.save(net, path)
    back = sipp.load(path, into=copy.deepcopy(net))
    assert not any(module.training for module in back.modules()) and net.training


def test_what_prune_and_prune_to_give_stands_for_its_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data, holdout, fresh = torch.rand(100, 8), torch.rand(300, 8), torch.rand(100, 8)
    found = sipp.prune_to(net, data, holdout, epsilon=0.9, progress=False)
    none = sipp.prune_to(net, data, holdout[:20], epsilon=0.9, progress=False)
    assert found.pruned is not None and found.keep < 1 and none.pruned is None
    for one in (found.pruned, found, none):
        expected = sipp.certify(net, one.model, fresh)
        assert sipp.certify(net, one, fresh).pruned_hash == expected.pruned_hash
        path = tmp_path / "net.safetensors"
        contents = sipp.save(one, path, certificate=expected)
        assert contents.certificate_about == "stored values"
        assert (contents.pruned is None) == (one is none)
        assert set(contents.masks) == (set() if one is none else set(found.pruned.masks))


# --- positions: a slow, obvious reading of the same bytes, and the entropy bound --------------------------------------


def draw(n_weights: int, keep: float, seed: int) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random(n_weights) < keep


def slowly(kind: str, code: bytes, n_weights: int) -> list[bool]:
    """The flags, weight by weight, as the docstring of coding.py says them."""
    if kind == "all":
        return [True] * n_weights
    if kind == "bitmask":
        return [bool(code[i // 8] >> (i % 8) & 1) for i in range(n_weights)]
    flags: list[bool] = []
    for symbol in zlib.decompressobj(-15).decompress(code):
        flags += [False] * symbol
        if symbol != 255:
            flags.append(True)
    assert flags.pop() is True and len(flags) == n_weights
    return flags


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.999, 1.0]), st.integers(0, 99))
def test_round_trip_and_the_slow_reading_agree(n_weights: int, keep: float, seed: int) -> None:
    flags = draw(n_weights, keep, seed)
    kind, code = encode_positions(flags)
    assert slowly(kind, code, n_weights) == flags.tolist()
    back = decode_positions(kind, memoryview(code), n_weights)
    assert np.array_equal(back, flags) and back.dtype == np.bool_
    assert len(code) <= math.ceil(n_weights / 8)


@pytest.mark.parametrize("keep", [0.5, 0.4, 0.382, 0.35, 0.3, 0.2, 0.1, 0.05, 0.02])
def test_positions_are_close_to_the_entropy_also_where_all_rows_are_alike(keep: float) -> None:
    flags = draw(400_000, keep, 0)
    _, code = encode_positions(flags)
    assert len(code) <= 1.05 * entropy_bytes(flags.size, int(flags.sum()))
    kept_bytes = int(flags.sum())  # the cheapest values there are: int8
    assert len(code) + kept_bytes <= 1.03 * (entropy_bytes(flags.size, kept_bytes) + kept_bytes)
