"""Out of memory: a smaller chunk and the same result, or a typed error with a way out (faked, by counting bytes)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError
from sipp.inputs.patches import WeightUse
from sipp.results.options import Reduce
from sipp.scoring.kernels import cpu, reference
from sipp.scoring.kernels.protocol import Chunk, ChunkRatios, KernelFunctions
from sipp.scoring.sensitivities import chunk_bytes_on, measure_sensitivities
from sipp.scoring.task import LayerSensitivities, task_of

ERRORS = [MemoryError("full"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 1")]


def model_and_data() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3)), torch.randn(4, 3, 9, 9) * torch.tensor(
        [1.0, 30.0, 2.0, 0.1]
    ).view(4, 1, 1, 1)


def limited(most_patches: int, error: BaseException) -> KernelFunctions:
    """The reference with room for `most_patches` patches at once."""

    def guarded(real: Any) -> Any:
        def of_chunk(chunk: Chunk, *rest: Any) -> tuple[Tensor, Tensor]:
            if chunk.patches_GKP.shape[2] > most_patches:
                raise error
            return real(chunk, *rest)

        return of_chunk

    functions = map(guarded, (reference.max_chunk, reference.sum_chunk))
    return replace(reference.KERNEL, ratios=partial(ChunkRatios, *functions))


def run(monkeypatch: pytest.MonkeyPatch, kernel: KernelFunctions, reduce: str) -> tuple[LayerSensitivities, ...]:
    monkeypatch.setattr("sipp.scoring.kernels.pick", lambda name, device: kernel)
    model, data = model_and_data()
    return measure_sensitivities(task_of(model, [data]), reduce=reduce).layers  # type: ignore[arg-type]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_a_smaller_chunk_and_the_same_result(
    error: BaseException, reduce: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(monkeypatch, limited(10**9, error), reduce)
    assert not caplog.records
    got = run(monkeypatch, limited(20, error), reduce)
    assert "in pieces of" in caplog.text
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one.sensitivity_FK, other.sensitivity_FK, rtol=1e-6)
        assert reduce == "mean" or torch.equal(one.sensitivity_FK, other.sensitivity_FK)
        assert one.sign_complexity == pytest.approx(other.sign_complexity)
        assert one.output_ratio == pytest.approx(other.output_ratio)  # no patch was counted twice, or for another point


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_too_little_memory_for_one_patch_is_an_error(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"0\.weight.*bytes"):
        run(monkeypatch, limited(0, ERRORS[0]), reduce)


def test_another_error_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(monkeypatch, limited(0, RuntimeError("mat1 and mat2 shapes cannot be multiplied")), "max")


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_the_fused_kernel_takes_fewer_points(reduce: Reduce, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = model_and_data()
    expected = sipp.sensitivity(model, [data], reduce=reduce)
    real, asked = cpu.Ratios.take_in, list[int]()

    def tight(ratios: cpu.Ratios, use: WeightUse, *rest: Any) -> Tensor:
        asked.append(len(use.windows))
        if len(use.windows) > 1:
            raise MemoryError
        return real(ratios, use, *rest)

    monkeypatch.setattr(cpu.Ratios, "take_in", tight)
    got = sipp.sensitivity(model, [data], reduce=reduce)
    assert all(torch.equal(got[weight], expected[weight]) for weight in expected)
    assert asked[0] == 4 and asked.count(1) >= 4

    def never(*_: object) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(cpu.Ratios, "take_in", never)
    with pytest.raises(ModelError, match="out of memory"):
        sipp.sensitivity(model, [data], reduce=reduce)


def test_a_chunk_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for gib, wanted in ((8, 1 << 30), (128, 2 << 30)):
        there = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, there=there: there)
        assert chunk_bytes_on(torch.device("cuda")) == wanted > chunk_bytes_on(torch.device("cpu")) > 0
