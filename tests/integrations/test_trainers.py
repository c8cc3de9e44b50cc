"""Masks hold in the trainers of other libraries, through a checkpoint and on from it; FSDP cuts them like weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sipp
from sipp.errors import OptionError
from sipp.integrations.masks import masks_to_hold
from sipp.pruning import hold

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 2))


def pruned() -> sipp.Pruned:
    return sipp.prune(net(), None, keep=0.3, method="magnitude")


def is_held(model: nn.Module, masks: dict[str, Tensor]) -> bool:
    return all(bool((model.get_parameter(name)[~mask] == 0).all()) for name, mask in masks.items())


def data() -> TensorDataset:
    x = torch.randn(32, 7, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


# --- masks ------------------------------------------------------------------------------------------------------------


def test_what_is_given_must_be_what_is_stored() -> None:
    found = pruned()
    other = {name: ~mask for name, mask in found.masks.items()}
    assert masks_to_hold(found.model, other, None).keys() == other.keys()
    with pytest.raises(OptionError, match="other masks than the ones given"):
        masks_to_hold(found.model, other, found.masks)


# --- Lightning --------------------------------------------------------------------------------------------------------


def test_lightning_holds_stores_and_resumes(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("pytorch_lightning", reason="needs the extra lightning")
    from sipp.integrations.lightning import HoldMasks

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = pruned().model
            self.head = nn.Linear(2, 2)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.head(self.net(batch[0])), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    found, loader = pruned(), DataLoader(data(), batch_size=8)
    masks = found.masks
    options = {"accelerator": "cpu", "default_root_dir": tmp_path, "enable_checkpointing": True} | QUIET
    module, file = Module(), tmp_path / "one.ckpt"
    trainer = lightning.Trainer(max_epochs=1, callbacks=[HoldMasks(found, part="net")], **options)
    trainer.fit(module, loader)
    trainer.save_checkpoint(file)
    assert is_held(module.net, masks) and not module.net[0]._forward_pre_hooks  # released
    assert not torch.equal(module.net[0].weight, pruned().model.get_parameter("0.weight"))  # and it was trained
    stored = torch.load(file, weights_only=True)["callbacks"]["sipp.HoldMasks('net')"]["masks"]
    assert stored.keys() == masks.keys()

    resumed, hold = Module(), HoldMasks(part="net")  # no masks: those of the checkpoint
    with torch.no_grad():
        resumed.net[0].weight.fill_(1.0)  # as a script that builds its network anew and prunes nothing
    lightning.Trainer(max_epochs=2, callbacks=[hold], **options).fit(resumed, loader, ckpt_path=file)
    assert is_held(resumed.net, masks) and all(torch.equal(mask, hold.masks[name]) for name, mask in masks.items())
    other = {name: ~mask for name, mask in masks.items()}
    wrong = HoldMasks(replace(found, masks=other), part="net")
    with pytest.raises(OptionError, match="other masks"):
        lightning.Trainer(max_epochs=2, callbacks=[wrong], **options).fit(Module(), loader, ckpt_path=file)


# --- the Trainer of transformers --------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A network as the Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = pruned().model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": F.cross_entropy(out, labels), "logits": out}


def test_the_hf_trainer_holds_stores_and_resumes(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("accelerate", reason="needs the extra train")
    from sipp.integrations.hugging_face import FILE, HoldMasks

    rows = [{"x": x, "labels": y} for x, y in data()]
    masks = {f"net.{name}": mask for name, mask in pruned().masks.items()}

    def trained(n_steps: int, hold: HoldMasks, **how: Any) -> nn.Module:
        model = Classifier()
        options = transformers.TrainingArguments(
            str(tmp_path), max_steps=n_steps, save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
            learning_rate=1e-2, weight_decay=0.1, save_only_model=False,
        )  # fmt: skip
        transformers.Trainer(model, options, train_dataset=rows, callbacks=[hold]).train(**how)
        return model

    first = trained(2, HoldMasks(Classifier()))
    assert is_held(first, masks) and not first.net[0]._forward_pre_hooks
    assert (tmp_path / "checkpoint-2" / FILE).is_file()
    hold = HoldMasks()
    second = trained(4, hold, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert is_held(second, masks) and all(torch.equal(mask, hold.masks[name]) for name, mask in masks.items())
    assert not torch.equal(first.net[0].weight, second.net[0].weight)
    (tmp_path / "checkpoint-2" / FILE).unlink()
    third = HoldMasks()
    assert is_held(trained(3, third, resume_from_checkpoint=str(tmp_path / "checkpoint-2")), masks)  # from its zeros


# --- Accelerate, FSDP -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_accelerate_has_the_zeros_to_go_on_from(tmp_path: Path) -> None:
    accelerate: Any = pytest.importorskip("accelerate", reason="needs the extra train")
    found = pruned()

    def prepared(model: nn.Module) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        wrapped, steps = accelerator.prepare(model, optimizer)
        return accelerator, accelerator.unwrap_model(wrapped), optimizer, steps

    def step(accelerator: Any, model: nn.Module, steps: Any) -> None:
        steps.zero_grad()
        accelerator.backward(model(torch.ones(4, 7)).square().mean())
        steps.step()

    accelerator, model, optimizer, steps = prepared(found.model)
    sipp.hold(model, found, optimizer=optimizer)
    step(accelerator, model, steps)
    accelerator.save_state(str(tmp_path))
    accelerator, model, optimizer, steps = prepared(net())
    accelerator.load_state(str(tmp_path))
    sipp.hold(model, model, optimizer=optimizer)
    step(accelerator, model, steps)
    assert is_held(model, found.masks)


def test_fully_sharded_parameters_are_held() -> None:
    dist: Any = pytest.importorskip("torch.distributed", reason="needs torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available() or sys.platform != "linux":
        pytest.skip("needs gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found, mesh = pruned(), init_device_mesh("cpu", (1,))
        model: Any = found.model
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

        def step() -> dict[str, Tensor]:
            optimizer.zero_grad()
            model(torch.ones(4, 7)).square().mean().backward()
            optimizer.step()
            return {name: model.get_parameter(name).full_tensor() for name in found.masks}

        step()  # so that there is momentum from before
        held = sipp.hold(model, found, optimizer=optimizer)
        assert (held.n_kept, held.n_weights) == (found.kept, found.n_weights)
        for _ in range(2):
            weights = step()
            assert all(bool((weights[name][~mask] == 0).all()) for name, mask in found.masks.items())
        with pytest.raises(OptionError, match="would bring back"):
            hold(model, {name: torch.ones_like(mask) for name, mask in found.masks.items()})
        sipp.release(model)
        weights = step()
        assert any(bool((weights[name][~mask] != 0).any()) for name, mask in found.masks.items())
    finally:
        dist.destroy_process_group()
