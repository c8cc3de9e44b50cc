"""Folders of Hugging Face that try to run code, to ask, or to read what lies outside of them; and good ones beside.

As a script it runs the command line on every folder in one process, and prints what happened as JSON.
"""

import ctypes
import io
import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RUN_BY = (".py", ".bin", ".pkl", ".pt", ".jinja", ".pth")  # files of which not even a byte is needed
WATCHED = 0x1 | 0x20  # IN_ACCESS, IN_OPEN
Change = Callable[[Path, "Outside"], object]


@dataclass(frozen=True)
class Outside:
    """A whole folder that no hostile folder may reach, and the file that hostile code makes when it runs."""

    folder: Path
    ran: Path

    @property
    def code(self) -> str:
        return f"open({str(self.ran)!r}, 'a').write(__file__)\n"


@dataclass(frozen=True)
class Seen:
    """What one folder did under the command line, and under the reader of text alone."""

    name: str
    stdin: str
    code: int
    stdout: str
    stderr: str
    read: str  # the sentences' tokens, or the error of reading them
    ran: bool
    touched: list[str]  # files outside that were opened, and files in the folder that hold code
    tried: list[str]  # what Python was asked to do besides: sockets, processes, pickles
    asked: int  # bytes of stdin that were read


class Payload:
    """A pickle that runs."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.ran), "a")


def _json(path: Path, values: dict[str, Any]) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | values))


def config(**values: object) -> Change:
    return lambda folder, outside: _json(folder / "config.json", values)


def config_with_code(**values: object) -> Change:
    def change(folder: Path, outside: Outside) -> None:
        (folder / "mine.py").write_text(outside.code)
        _json(folder / "config.json", values)

    return change


def tokenizer_with_code(**values: object) -> Change:
    def change(folder: Path, outside: Outside) -> None:
        (folder / "mine.py").write_text(outside.code)
        _json(folder / "tokenizer_config.json", values)

    return change


def linked(name: str) -> Change:
    """A file of the folder that is a link to the same file outside."""

    def change(folder: Path, outside: Outside) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside.folder / name)

    return change


def index(file: str) -> Change:
    """An index that says where all weights lie."""

    def change(folder: Path, outside: Outside) -> None:
        names = json.loads((outside.folder / "names.json").read_text())
        (folder / "model.safetensors").unlink()
        where = file.replace("OUTSIDE", str(outside.folder))
        values = {"metadata": {}, "weight_map": dict.fromkeys(names, where)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(values))

    return change


def pickled(*files: str) -> Change:
    """Pickles that run under these names, and no safetensors."""

    def change(folder: Path, outside: Outside) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        for name in files:
            (folder / name).write_bytes(pickle.dumps(Payload(outside.ran)))

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path, outside: Outside) -> None:
        for one in changes:
            one(folder, outside)

    return change


def placed(name: str, content: str) -> Change:
    """A file, in which OUTSIDE and RAN stand for those places."""

    def change(folder: Path, outside: Outside) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content.replace("OUTSIDE", str(outside.folder)).replace("RAN", str(outside.ran)))

    return change


def code_at(name: str) -> Change:
    def change(folder: Path, outside: Outside) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(outside.code)

    return change


def without(*names: str) -> Change:
    def change(folder: Path, outside: Outside) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def pipe(name: str) -> Change:
    def change(folder: Path, outside: Outside) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def _to_outside(name: str, key: str, value: Any) -> Change:
    """A JSON file with a value in which OUTSIDE stands for that place."""

    def change(folder: Path, outside: Outside) -> None:
        _json(folder / name, {key: json.loads(json.dumps(value).replace("OUTSIDE", str(outside.folder)))})

    return change


def _linked_folder(folder: Path, outside: Outside) -> None:
    (folder / "sub").symlink_to(outside.folder)
    index("sub/model.safetensors")(folder, outside)


def _linked_shard(folder: Path, outside: Outside) -> None:
    index("shard.safetensors")(folder, outside)
    (folder / "shard.safetensors").symlink_to(outside.folder / "model.safetensors")


MINE = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model", "AutoTokenizer": ["mine.Slow", "mine.Fast"]}
CODE = {"AutoTokenizer": [None, "mine.Fast"]}
QUANTISED = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "mine"}
JINJA = "{{ cycler.__init__.__globals__.os.system('touch RAN') }}"
ADAPTER = '{"peft_type": "LORA", "base_model_name_or_path": "OUTSIDE", "auto_mapping": {"parent_library": "mine"}}'

REFUSED: dict[str, Change] = {
    "code for an unknown type": config_with_code(model_type="mine", auto_map=MINE),
    "code for a known type": config_with_code(auto_map=MINE),
    "code for the network, no class named": config_with_code(auto_map={"AutoModel": "mine.Model"}, architectures=None),
    "code for the network, another class": config_with_code(auto_map={"AutoModel": "mine.M"}, architectures=["M"]),
    "code for the head": config_with_code(auto_map={"AutoModelForSequenceClassification": "mine.Model"}),
    "code of another repository": config_with_code(auto_map={"AutoConfig": "evil/repo--mine.Config"}),
    "code in a part": config_with_code(text_config={"model_type": "mine", "auto_map": MINE}),
    "code, and trust asked for": config_with_code(auto_map=MINE, trust_remote_code=True),
    "code for pipelines": config_with_code(custom_pipelines={"text-classification": {"impl": "mine.Pipeline"}}),
    "code for the tokenizer in config.json": config_with_code(auto_map=CODE, tokenizer_class="Fast"),
    "code for the tokenizer": tokenizer_with_code(auto_map=CODE, tokenizer_class="Fast"),
    "code for the tokenizer, old form": tokenizer_with_code(auto_map=["mine.Slow", None], tokenizer_class="Slow"),
    "code for the tokenizer, trust asked for": tokenizer_with_code(auto_map=CODE, trust_remote_code=True),
    "attention of the hub": config(attn_implementation="evil/kernel"),
    "attention of the hub, private name": config(_attn_implementation="evil/kernel:run"),
    "attention of the hub, paged": config(attn_implementation="paged|evil/kernel"),
    "attention of the hub, in parts": config(attn_implementation={"text_config": "evil/kernel", "": "eager"}),
    "attention of a package": config(attn_implementation="flash_attention_2"),
    "attention in a folder": _to_outside("config.json", "attn_implementation", "OUTSIDE"),
    "experts of the hub": config(experts_implementation="evil/kernel"),
    "kernels": config(kernel_config={"kernel_mapping": {"BertLayer": "evil/kernel:Layer"}}, use_kernels=True),
    "quantised": config(quantization_config=QUANTISED),
    "quantised by an unknown method": config(quantization_config={"quant_method": "mine"}),
    "compressed": config(compression_config={"quant_method": "compressed-tensors", "config_groups": {}}),
    "fusions": config(fusion_config={"patch": "mine"}),
    "another configuration": config(configuration_files=["config.4.0.0.json"]),
    "another network within": _to_outside("config.json", "backbone", "OUTSIDE"),
    "another network by name": config(model_type="upernet", backbone="evil", use_pretrained_backbone=True),
    "weights by another name": config(transformers_weights="../outside/model.safetensors"),
    "weights of a path in a word": _to_outside("config.json", "vision_tower", "OUTSIDE/model.safetensors"),
    "index that climbs": index("../outside/model.safetensors"),
    "index with a path": index("OUTSIDE/model.safetensors"),
    "index to a pickle": both(index("weights.bin"), lambda f, o: (f / "weights.bin").write_bytes(
        pickle.dumps(Payload(o.ran)))),
    "index through a linked folder": _linked_folder,
    "index to a link": _linked_shard,
    "index of nothing": placed("model.safetensors.index.json", '{"weight_map": []}'),
    "weights linked": linked("model.safetensors"),
    "config.json linked": linked("config.json"),
    "tokenizer linked": linked("tokenizer.json"),
    "settings of the tokenizer linked": linked("tokenizer_config.json"),
    "tokens linked": linked("special_tokens_map.json"),
    "vocabulary linked": both(without("tokenizer.json"), linked("vocab.txt")),
    "a pickle": pickled("pytorch_model.bin"),
    "a pickle as safetensors": pickled("model.safetensors"),
    "a pickle and its index": both(pickled("weights.bin"), placed(
        "pytorch_model.bin.index.json", '{"metadata": {}, "weight_map": {"classifier.bias": "weights.bin"}}')),
    "an adapter": placed("adapter_config.json", ADAPTER),
    "config.json without an end": placed("config.json", "[" * 100_000),
    "config.json nested": placed("config.json", '{"model_type": "bert", "x": ' + '{"x": ' * 900 + "1" + "}" * 901),
    "config.json of nothing": placed("config.json", "[]"),
    "weights are a pipe": pipe("model.safetensors"),
    "a length that is none": config(max_position_embeddings="long"),
    "type that climbs": config(model_type="../../outside/mine", architectures=None),
}  # fmt: skip
# The index counts only without a file of all weights.
REFUSED["index of nothing"] = both(without("model.safetensors"), REFUSED["index of nothing"])


def _shards(folder: Path, outside: Outside) -> None:
    """The same weights in two files, as save_pretrained writes large ones."""
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: t for name, t in state.items() if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    values = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))


HARMLESS: dict[str, Change] = {  # what is not read does no harm: the network is that of the good folder
    "good": lambda folder, outside: None,
    "good, in parts": _shards,
    "came from outside": _to_outside("config.json", "_name_or_path", "OUTSIDE"),
    "class that is none": config(architectures=["__builtins__"], num_labels=2),
    "code for inputs": both(code_at("mine.py"), placed(
        "preprocessor_config.json", '{"auto_map": {"AutoProcessor": "mine.P", "AutoImageProcessor": "mine.I"}}'),
        placed("processor_config.json", '{"auto_map": {"AutoProcessor": "mine.P"}}')),
    "code for words": both(code_at("custom_generate/generate.py"), placed(
        "generation_config.json", '{"auto_map": {"AutoModel": "custom_generate.generate"}, "custom_generate": "."}')),
    "templates": both(placed("chat_template.jinja", JINJA), placed("additional_chat_templates/x.jinja", JINJA)),
    "template in the settings": _to_outside("tokenizer_config.json", "chat_template", JINJA),
    "files outside, in the settings": both(*(_to_outside("tokenizer_config.json", key, "OUTSIDE/tokenizer.json")
        for key in ("tokenizer_file", "vocab_file", "name_or_path", "merges_file"))),
    "files outside, among the tokens": both(*(_to_outside("special_tokens_map.json", key, "OUTSIDE/tokenizer.json")
        for key in ("tokenizer_file", "vocab_file", "name_or_path"))),
    "tokenizer outside": _to_outside(
        "tokenizer_config.json", "fast_tokenizer_files", ["../outside/tokenizer.1.0.0.json"]),
    "arguments of the tokenizer": _to_outside("tokenizer_config.json", "init_inputs", ["OUTSIDE/vocab.txt"]),
    "a pickle beside": lambda f, o: (f / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(o.ran))),
}  # fmt: skip
# what transformers asks is whether code may run, and it does something else where nobody can answer
WITHOUT_STDIN = [name for name in (*HARMLESS, *REFUSED) if name == "good" or "code" in name]
MODULES = ("kernels", "peft", "timm", "flash_attn", "bitsandbytes", "sentencepiece")  # transformers looks for these


def build(root: Path, good: Path) -> Outside:
    """All folders below `root`, made of the good one."""
    outside = Outside(root / "outside", root / "ran")
    shutil.copytree(good, outside.folder)
    shutil.copy(good / "tokenizer.json", outside.folder / "tokenizer.1.0.0.json")
    from safetensors.torch import load_file

    (outside.folder / "names.json").write_text(json.dumps(sorted(load_file(good / "model.safetensors"))))
    for name, change in {**REFUSED, **HARMLESS}.items():
        shutil.copytree(good, root / name)
        change(root / name, outside)
    for name in MODULES:  # where Python was started in the folder itself
        (root / "good" / f"{name}.py").write_text(outside.code)
    return outside


class Watch:
    """Records which files below some folders are opened or read, as the kernel reports it."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = libc.inotify_init1(os.O_NONBLOCK)
        assert self.file >= 0
        self.names = {libc.inotify_add_watch(self.file, str(f).encode(), WATCHED): f for f in folders}
        assert min(self.names) >= 0

    def close(self) -> list[Path]:
        try:
            data = os.read(self.file, 1 << 20)
        except BlockingIOError:
            data = b""
        finally:
            os.close(self.file)
        found, at = [], 0
        while at < len(data):
            number, _, _, length = struct.unpack_from("iIII", data, at)
            name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            found.append(self.names[number] / name)
            at += 16 + length
        return list(dict.fromkeys(found))


TRIED: list[str] = []
FORBIDDEN = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn",
             "pickle.find_class", "builtins.input")  # fmt: skip


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FORBIDDEN:
        TRIED.append(f"{event} {arguments!r:.200}")


def see(root: Path, name: str, stdin: str) -> Seen:
    """What one folder does."""
    from commandline import run

    from sipp.cli.language_text import sentences

    folder, outside = root / name, Outside(root / "outside", root / "ran")
    inner = [path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()]
    watch = Watch(outside.folder, folder, *inner)
    TRIED.clear()
    if stdin == "yes":
        os.lseek(0, 0, os.SEEK_SET)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    net = ["--model", f"hf:{folder}", "--data", folder / "sentences.txt", "--method", "wt"]
    done = run("prune", *net, "--keep", 0.5, "--no-statements", "--dry-run")
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        try:
            read = str(sentences(folder / "sentences.txt", f"hf:{folder}")["input_ids"].tolist())
        except Exception as error:
            read = f"{type(error).__name__}: {error}"
    asked = os.lseek(0, 0, os.SEEK_CUR) if stdin == "yes" else 0
    tried = list(TRIED)
    opened = watch.close()
    touched = [str(p) for p in opened if p.is_relative_to(outside.folder) or p.suffix in RUN_BY]
    stdout = f"{done.stdout}{told.getvalue()}"
    ran = outside.ran.exists()
    outside.ran.unlink(missing_ok=True)
    return Seen(name, stdin, done.returncode, stdout, done.stderr, read, ran, touched, tried, asked)


def main(root: Path) -> None:
    """Every folder with a stdin full of "y", the file `yes`, then those of WITHOUT_STDIN with none."""
    os.chdir(root)
    os.dup2(os.open("yes", os.O_RDONLY), 0)
    sys.addaudithook(_hook)
    sys.path.insert(0, str(root / "good"))  # as `python -m` does where it is started there
    names = ["good", *(name for name in (*HARMLESS, *REFUSED) if name != "good")]
    found = [see(root, name, "yes") for name in names]
    os.close(0)
    sys.stdin = None  # type: ignore[assignment]  # as Python does where it is closed
    found += [see(root, name, "closed") for name in WITHOUT_STDIN]
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
