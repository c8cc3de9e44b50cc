"""A folder from others: nothing in it runs, nothing is asked, nothing outside of it is read, no network is tried."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_process import run_script
from hostile_folders import HARMLESS, REFUSED, WITHOUT_STDIN, build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux tells what is opened")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """What every folder did, by name and stdin: all in one process, so that transformers is imported once."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("folders")
    good = root / "model"
    good.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (good / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(str(good / "vocab.txt")).save_pretrained(good)
    (good / "special_tokens_map.json").write_text('{"unk_token": "[UNK]", "pad_token": "[PAD]"}')
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(good)
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(list("abcdefghij"), rng.integers(2, 9))) for _ in range(8)]
    (good / "sentences.txt").write_text("\n".join(lines))
    build(root, good)
    (root / "yes").write_text("y\n" * 10_000)
    done = run_script(Path(__file__).parent / "hostile_folders.py", root)
    assert done.returncode == 0, done.stderr
    assert "[y/N]" not in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {(one["name"], one["stdin"]): one for one in found}


@pytest.mark.parametrize(
    ("name", "stdin"),
    [*((name, "yes") for name in (*HARMLESS, *REFUSED)), *((name, "closed") for name in WITHOUT_STDIN)],
)
def test_nothing_runs_and_nothing_outside_is_read(seen: dict[tuple[str, str], Any], name: str, stdin: str) -> None:
    one = seen[name, stdin]
    assert not one["ran"] and not one["touched"] and not one["tried"] and not one["asked"], one
    assert "trust_remote_code" not in one["stderr"] + one["stdout"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_folder_is_refused_in_three_lines(seen: dict[tuple[str, str], Any], name: str) -> None:
    one = seen[name, "yes"]
    told = [line.split(":")[0] for line in one["stderr"].splitlines() if not line.startswith("warning: ")]
    assert one["code"] == 2 and told == ["error", "where", "do"] and one["stdout"] == "", one


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_read_changes_nothing(seen: dict[tuple[str, str], Any], name: str) -> None:
    one, good = seen[name, "yes"], seen["good", "yes"]
    stdout, expected = (text.partition("time: ")[0] for text in (one["stdout"], good["stdout"]))
    if name == "class that is none":  # the network without its head, whose weights are left out
        assert one["code"] == 0 and "left out" in one["stderr"], one
    else:
        assert one["code"] == 0 and stdout == expected.replace("/good", f"/{name}"), one
    assert one["read"] == good["read"] and one["read"].startswith("[[")
