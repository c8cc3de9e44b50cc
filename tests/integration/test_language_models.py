"""Causal language models as they are: pruned, used, stored, written as a folder, read by transformers."""

import warnings
from pathlib import Path

import pytest
import torch
from language_models import KINDS, folder_of_language_model, language_model, sequences
from oracles.patterns import obeys
from safetensors.torch import load_file
from torch import Tensor

import sipp
from sipp.errors import OptionError
from sipp.inputs.capture import turn_off_caches
from sipp.scoring.input_scores import wanda
from sipp.scoring.task import task_of

pytestmark = pytest.mark.filterwarnings("ignore:.*the head, stays as it is", "ignore::sipp.errors.DeadRowsWarning")


def logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_pruned_used_stored_and_exported(kind: str, tmp_path: Path) -> None:
    model, data = language_model(kind), [{"input_ids": part} for part in sequences(24).split(8)]
    ids = sequences(2, 10, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for method in ("wanda", "sipp-det"):
        pruned = sipp.prune(model, data, keep=0.5, method=method, statements=False, progress=False)
        assert abs(pruned.keep - 0.5) < 0.01
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert pruned.model.config.use_cache is True  # off while scoring, and as it was afterwards
    outside = [name for name in pruned.masks if "embed" in name or "head" in name or "wte" in name]
    assert not outside and len(pruned.masks) >= 8
    found = pruned.model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert found.shape == (2, 13)
    sipp.save(pruned, tmp_path / "small.safetensors")
    again = language_model(kind)
    sipp.load(tmp_path / "small.safetensors", into=again)
    sipp.export(pruned.model, tmp_path / "hf")
    back = type(model).from_pretrained(tmp_path / "hf").eval()
    expected = logits(pruned.model, ids)
    assert torch.equal(logits(again, ids), expected) and torch.equal(logits(back, ids), expected)
    assert not torch.equal(logits(model, ids), expected)


def routed(n_sequences: int) -> tuple[torch.nn.Module, Tensor]:
    """A mixture of four experts that sends no token to the last one."""
    model = language_model("Mixtral", num_experts_per_tok=1)
    with torch.no_grad():
        for block in model.model.layers:
            gate = block.mlp.gate.weight
            gate[1], gate[3] = -gate[0], 0.0
    return model, sequences(n_sequences)


def test_an_expert_is_scored_by_its_own_tokens() -> None:
    """Wanda's score beside its definition, from what the experts were called with."""
    model, data = routed(4)
    experts = model.model.layers[0].mlp.experts
    calls: list[tuple[Tensor, ...]] = []
    handle = experts.register_forward_pre_hook(lambda module, args: calls.append(args))
    logits(model, data)
    handle.remove()
    tokens, chosen, _ = calls[0]
    scores = wanda(task_of(model, data))
    for expert in range(4):
        mine = tokens[(chosen == expert).any(1)]
        gate, up = (mine @ experts.gate_up_proj[expert].T).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
        for name, inputs in (("gate_up_proj", mine), ("down_proj", inner)):
            weight = getattr(experts, name)[expert].detach()
            score = scores[f"model.layers.0.mlp.experts.{name}"][expert]
            assert torch.allclose(score, (weight.abs() * inputs.norm(dim=0)).double(), rtol=1e-4, atol=1e-7)


def without_weights(model: torch.nn.Module) -> torch.nn.Module:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        return type(model)(model.config)


def on_disk(model: torch.nn.Module, data: Tensor, place: Path, **goal: object) -> torch.nn.Module:
    """The model as transformers reads it from the folder that it was pruned to, from a folder of its own."""
    model.save_pretrained(place / "dense")
    sipp.prune_on_disk(without_weights(model), place / "dense", data, place / "out", progress=False, **goal)
    found: torch.nn.Module = type(model).from_pretrained(place / "out", dtype=model.dtype).eval()
    return found


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("Llama", torch.bfloat16)])
def test_every_kind_goes_from_files_to_files(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A mixture has one tensor of all experts, and one of each in its files, under other names."""
    model, data = language_model(kind).to(dtype), sequences(8)
    found = on_disk(model, data, tmp_path, pattern="2:4")
    whole = sipp.prune(model, data, pattern="2:4", method="wanda", statements=False, progress=False)
    differ = [name for name, t in whole.model.state_dict().items() if not torch.equal(t, found.state_dict()[name])]
    assert not differ and {p.dtype for p in found.parameters()} == {dtype}
    names = [{*load_file(path)} for path in (tmp_path / "dense").glob("*.safetensors")]
    assert {name for path in (tmp_path / "out").glob("*.safetensors") for name in load_file(path)} == set.union(*names)


@pytest.mark.parametrize("kind", ["GPT2", "Mixtral"])
def test_a_repair_keeps_the_pattern_from_files_to_files(kind: str, tmp_path: Path) -> None:
    """Of columns, as GPT-2 has its weights, and of experts."""
    model, data = language_model(kind), sequences(12)
    cut = sipp.prune(model, None, pattern="2:4", method="magnitude", progress=False)
    found = on_disk(model, data, tmp_path, pattern="2:4", repair=True)
    masks = {name: found.get_parameter(name) != 0 for name in cut.masks}
    assert sum(int(mask.sum()) for mask in masks.values()) == cut.kept
    rows = [mask.t() if kind == "GPT2" else mask.flatten(0, -2) for mask in masks.values()]
    assert all(obeys(mask.tolist(), 2, 4) for mask in rows)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_model_with_a_cache_runs_sparse(kind: str) -> None:
    model, ids = language_model(kind), sequences(2, 8)
    fast = sipp.sparse(model, {"input_ids": ids})
    assert torch.allclose(fast(input_ids=ids).logits, logits(model, ids), atol=1e-4)
    assert model.config.use_cache is True and turn_off_caches(model.modules())


def test_a_folder_is_exported_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_of_language_model(tmp_path / "dense")
    (folder / "LICENSE").write_text("do as you like")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    made = sipp.export(model, tmp_path / "out", values="bf16", shard="10KB")
    assert set(made.beside) == {"LICENSE", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert "tokenizer.json" in str(made) and (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert words("w7 w9")["input_ids"] == [7, 9] and back.dtype == torch.bfloat16
    assert torch.equal(back.lm_head.weight, model.lm_head.weight.bfloat16())
    given = sipp.export(language_model("Llama"), tmp_path / "given", tokenizer=words)
    assert "tokenizer.json" in given.beside
    assert "without a tokenizer" in str(sipp.export(language_model("Llama"), tmp_path / "bare"))
    with pytest.raises(OptionError, match="is not a size"):
        sipp.export(model, tmp_path / "odd", shard="large")
    with pytest.raises(OptionError, match="are for a folder"):
        sipp.export(model, tmp_path / "net.onnx", {"input_ids": sequences(2, 8)}, values="bf16")
    model.generation_config.temperature, model.generation_config.do_sample = -1.0, False  # which transformers refuses
    with pytest.raises(ValueError, match="temperature"):
        sipp.export(model, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_onnx_takes_any_batch_and_length_and_gives_the_models_own_names(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = language_model("Llama")
    made = sipp.export(model, tmp_path / "net.onnx", {"input_ids": sequences(2, 8)})
    assert (made.n_inputs, made.n_tokens) == (None, None) and "any number of inputs, of any length" in str(made)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in (*session.get_inputs(), *session.get_outputs())] == ["input_ids", "logits"]
    ids = sequences(3, 13)
    found = torch.from_numpy(session.run(["logits"], {"input_ids": ids.numpy()})[0])
    assert torch.allclose(found, logits(model, ids), atol=1e-5)


def test_a_tied_head_is_named_once_without_advice_that_does_nothing() -> None:
    for tied, said in ((True, "lm_head, the head, is tied to the embedding, and stays dense"), (False, "include=")):
        model = language_model("Llama", tie_word_embeddings=tied)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pruned = sipp.prune(model, None, keep=0.5, method="magnitude")
            heads = [str(one.message) for one in told if "the head" in str(one.message)]
            assert len(heads) == 1 and said in heads[0] and ("include" in heads[0]) is not tied
            told.clear()
            sipp.assess(model, pruned, [{"input_ids": sequences()}])
            assert not [one for one in told if "the head" in str(one.message)]
