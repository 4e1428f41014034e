"""sample.py from its command line: what is printed, where, and what is refused."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sample
from conf.door import code_of
from data.tokenizer import Tokenizer, load_tokenizer
from gpt import checkpoint, folders, generate
from gpt.huggingface import hf_config, to_hf
from gpt.model import GPT, GPTConfig

ROOT = Path(sample.__file__).parent
BLOCK = 64


def tiny(vocab_size: int, n_embd: int = 16) -> GPT:
    model = GPT(
        GPTConfig(
            block_size=BLOCK,
            vocab_size=vocab_size,
            n_layer=1,
            n_head=1,
            n_embd=n_embd,
            embd_dropout=0.1,
            attn_dropout=0.1,
            resid_dropout=0.1,
        )
    )
    with torch.no_grad():
        model.wte.weight *= 20  # far from flat, so that greedy and sampled text differ
    return model


def save(folder: Path, model: GPT, tokenizer: Tokenizer) -> Path:
    """A Hugging Face folder."""
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(hf_config(model.config, tokenizer.eot)))
    save_file(to_hf(model.state_dict(), model.config), folder / "model.safetensors")
    return folder


def reciter(text: bytes, vocab_size: int = 257) -> GPT:
    """Says `text` byte by byte and then EOT, whatever is asked: position p holds its p-th id.

    Attention and MLP add nothing, and each position's embedding outweighs the token's.
    """
    script = [*text, 256]
    assert len(script) <= BLOCK
    model = tiny(vocab_size, n_embd=64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.h.parameters():
            p.zero_()
        rows = torch.randn(vocab_size, 64, generator=generator)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        model.wte.weight[:vocab_size] = rows
        model.wpe.weight.zero_()
        model.wpe.weight[: len(script)] = 100 * rows[script]
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"), tiny(257), load_tokenizer("byte"))


@pytest.fixture
def recite(tmp_path: Path) -> Callable[[bytes], str]:
    return lambda text: str(save(tmp_path / "recite", reciter(text), load_tokenizer("byte")))


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Arguments and standard input -> exit code, standard output, standard error."""

    def run(*args: str, stdin: bytes = b"", code: int = 0) -> tuple[bytes, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        got = command([*args, "--device", "cpu", "--dtype", "float32"])
        out, err = capfdbinary.readouterr()
        assert got == code, err
        if code == 2:
            assert out == b"" and err.startswith(b"error: ") and err.count(b"\n") == 1, err
        return out, err.decode()

    return run


def command(args: list[str]) -> int:
    return code_of(sample.main, args, "nothing was generated", shows=True)


def records(out: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.decode().splitlines()]


def test_standard_output_is_the_text_and_nothing_else(
    recite: Callable[[bytes], str], run: Any
) -> None:
    """Control characters of a file stay as they are; the folder and the seed go to stderr."""
    script = "é漢\tends\r\n\x1b[2J".encode()
    where = recite(script)
    out, err = run(where, "--prompt", "P", "--temperature", "0", "--seed", "9")
    assert out == b"P" + script + b"\n"
    assert err == f"{where}\nseed 9\n"


def test_a_terminal_gets_no_control_characters(
    recite: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from the model nor from the prompt; C1 included, which UTF-8 spells in two bytes."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    where = recite("a\tb\nc\x1b[2J\rd\x9b1m\x7f\x07漢".encode())
    for extra in ([], ["--json"]):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert command([where, "--prompt", "\x1b", "--temperature", "0", *extra]) == 0
        shown = terminal.getvalue()
        assert not set(shown) & {*map(chr, range(32)), *map(chr, range(128, 160))} - {"\t", "\n"}
        if not extra:
            r = "\ufffd"
            assert shown == f"{r}a\tb\nc{r}[2J{r}d{r}1m{r}{r}漢\n"


def test_end_of_text_stops_and_is_never_printed(recite: Callable[[bytes], str], run: Any) -> None:
    """EOT is the 5th new token of the text that starts from nothing."""
    where = recite(b"four")
    out, _ = run(where, "--temperature", "0", "--max-new-tokens", "50", "--seed", "1")
    assert out == b"four\n"
    out, _ = run(where, "--temperature", "0", "--max-new-tokens", "50", "--json")
    (record,) = records(out)
    assert record["text"] == "four" and record["prompt"] == ""
    assert record["new_tokens"] == 4 and record["ended_by"] == "eot"


def test_the_text_of_end_of_text_in_a_prompt_is_ordinary_text(folder: Path, run: Any) -> None:
    literal = "x<|endoftext|>y"
    out, _ = run(str(folder), "--prompt", literal, "--json", "--max-new-tokens", "5")
    (record,) = records(out)
    assert record["prompt"] == literal and record["text"].startswith(literal)
    assert record["prompt_tokens"] == len(literal)  # bytes here; as a special token it were one


def test_without_a_prompt_or_with_an_empty_one_a_document_starts(folder: Path, run: Any) -> None:
    """From EOT: another id in its place would give another greedy text."""
    base = [str(folder), "--temperature", "0", "--max-new-tokens", "20", "--json"]
    texts = [
        records(run(*base, *prompt)[0])[0]["text"]
        for prompt in ([], ["--prompt", ""], ["-"], ["--prompt", "a"])
    ]
    assert texts[0] == texts[1] == texts[2] != texts[3][1:]
    model = checkpoint.load_model(folder)
    idx = torch.tensor([[256]])
    for _ in range(20):
        idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], dim=1)
        if idx[0, -1] == 256:
            break
    new = bytes(i for i in idx[0].tolist() if i < 256)
    assert texts[0] == "".join(sample.Text(iter(new), bytes))


def test_a_prompt_is_taken_byte_for_byte_from_anywhere(
    folder: Path, tmp_path: Path, run: Any
) -> None:
    """Blank ends, CRLF and a byte-order mark are the user's; all three ways give one text."""
    prompt = "\ufeff  é 漢\r\n\n a=b, 'c'\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    base = [str(folder), "--seed", "4", "--max-new-tokens", "9"]
    outs = [
        run(*base, "--prompt", prompt)[0],
        run(*base, "--prompt-file", str(file))[0],
        run(*base, "-", stdin=prompt.encode())[0],
        run("-", *base, stdin=prompt.encode())[0],
    ]
    assert outs[0].startswith(prompt.encode()) and len(set(outs)) == 1


def test_a_prompt_beyond_the_context_is_returned_whole_with_a_notice(
    folder: Path, run: Any
) -> None:
    prompt = "".join(map(chr, range(33, 123))) * 2
    base = [str(folder), "--temperature", "0", "--max-new-tokens", "100"]
    out, err = run(*base, "--prompt", prompt)
    assert out.startswith(prompt.encode())
    assert f"the prompt has {len(prompt)} tokens and the context {BLOCK}" in err
    end = prompt[-BLOCK:]
    out_of_end, err = run(*base, "--prompt", end)
    assert out == prompt[:-BLOCK].encode() + out_of_end and "context" not in err


def test_seeds(folder: Path, run: Any) -> None:
    def texts(*args: str) -> list[str]:
        out, _ = run(str(folder), "--max-new-tokens", "30", "--json", *args)
        return [record["text"] for record in records(out)]

    three = texts("--seed", "5", "--num-samples", "3")
    assert three == texts("--seed", "5", "--num-samples", "3")
    assert len(set(three)) == 3
    assert texts("--seed", "5") == three[:1] != texts("--seed", "6")


def test_an_unseeded_run_prints_the_seed_that_repeats_it(folder: Path, run: Any) -> None:
    # Without a prompt this untrained model often ends at once: tied to it, the separator is likely.
    args = [str(folder), "--max-new-tokens", "30", "--prompt", "We the people"]
    out, err = run(*args)
    again, other_err = run(*args)
    assert err != other_err and out != again
    seed = err.splitlines()[-1].removeprefix("seed ")
    assert run(*args, "--seed", seed)[0] == out


def test_several_samples_are_told_apart(recite: Callable[[bytes], str], run: Any) -> None:
    out, _ = run(recite(b"abc"), "--temperature", "0", "--num-samples", "3")
    assert out == b"abc\n---\nabc\n---\nabc\n"


def test_stop_is_repeatable_and_not_printed(recite: Callable[[bytes], str], run: Any) -> None:
    where = recite("Ö one. two! three".encode())
    base = [where, "--temperature", "0"]
    assert run(*base, "--stop", "! t", "--stop", ". ")[0] == "Ö one\n".encode()
    assert run(*base, "--stop", "! t")[0] == "Ö one. two\n".encode()
    (record,) = records(run(*base, "--stop", "Ö", "--json")[0])
    assert (record["text"], record["ended_by"], record["new_tokens"]) == ("", "stop", 2)
    (record,) = records(run(*base, "--max-new-tokens", "6", "--json")[0])
    assert (record["text"], record["ended_by"], record["new_tokens"]) == ("Ö one", "length", 6)
    (record,) = records(run(*base, "--max-new-tokens", "1", "--json")[0])
    assert record["text"] == ""  # half of the first character


def test_a_tokenizer_of_another_vocabulary_is_named(tmp_path: Path, run: Any) -> None:
    """Only the folder's own tokenizer counts, so one of other data can't slip in silently."""
    save(tmp_path, tiny(200), load_tokenizer("byte"))
    _, err = run(str(tmp_path), "--prompt", "a", code=2)
    assert "has 257 tokens and the model 200" in err
    (tmp_path / "vocab.json").unlink()
    _, err = run(str(tmp_path), code=2)
    assert "tokenizer" in err and str(tmp_path) in err


def test_embeddings_without_a_token_are_never_chosen(tmp_path: Path, run: Any) -> None:
    """A table of 400 for 257 ids (model.vocab_size): so hot, every third draw would be none."""
    save(tmp_path, tiny(400), load_tokenizer("byte"))
    hot = ["--temperature", "9", "--top-k", "0", "--seed", "1", "--json"]
    (record,) = records(run(str(tmp_path), *hot)[0])
    assert record["new_tokens"] > 20


def test_every_character_is_known(folder: Path, run: Any) -> None:
    text = "\x00\U0010ffff漢"
    out, _ = run(str(folder), "-", "--max-new-tokens", "1", stdin=text.encode())
    assert out.startswith(text.encode())


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one run of two checkpoints: `best` at step 100, `latest` at step 200."""
    monkeypatch.setenv("GPT_ROOT", str(tmp_path))
    load_tokenizer("byte").save(tmp_path / "tokenizer")
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for step, text, loss in ((100, b"best", 2.5), (200, b"latest", 2.71828)):
        model = reciter(text)
        checkpoint.write(
            checkpoints / folders.step_name(step),
            checkpoint.snapshot(model, torch.optim.AdamW(model.parameters())),
            {"step": step, "val_loss": loss},
            256,
            tmp_path / "tokenizer",
        )
        folders.link(text.decode(), checkpoints / folders.step_name(step))
    return tmp_path


def test_file_step_and_validation_loss_are_printed(trained: Path, run: Any) -> None:
    run_folder = trained / "runs" / "mine"
    latest, best = run_folder / "checkpoints" / "latest", run_folder / "checkpoints" / "best"
    for args in (["mine"], [], [str(run_folder)], [str(latest)]):
        out, err = run(*args, "--temperature", "0")
        assert out == b"latest\n"
        assert "step_00000200, step 200, val loss 2.7183\n" in err or args == [str(latest)]
        assert "step 200, val loss 2.7183\n" in err
    out, err = run(str(best), "--temperature", "0")
    assert out == b"best\n" and "step 100, val loss 2.5000\n" in err
    (record,) = records(run(str(best), "--temperature", "0", "--json")[0])
    assert (record["step"], record["val_loss"]) == (100, 2.5)


def test_a_validation_loss_of_an_earlier_step_is_said_to_be(trained: Path, run: Any) -> None:
    newest = trained / "runs" / "mine" / "checkpoints" / "step_00000200"
    state = folders.read_state(newest) or {}
    for step, said in ((150, "val loss 2.7183 at step 150\n"), (200, "val loss 2.7183\n")):
        text = json.dumps(folders.seal({**state, "val_step": step}))
        (newest / folders.STATE).write_text(text)
        assert f"step 200, {said}" in run("mine", "--temperature", "0")[1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"save_every": 250, "eval_every": 400, "max_steps": 800}, "at step 250 at the latest"),
        ({"save_every": 250, "eval_every": 100, "max_steps": 800}, "at step 100 at the latest"),
        ({"save_every": 0, "eval_every": "null", "max_steps": 800}, "at step 800 at the latest"),
        (
            {"save_every": 0, "eval_every": 100, "max_steps": 800, "val_fraction": 0.0},
            "at step 800 at the latest",
        ),
        ({}, "when it ends or is stopped"),
    ],
)
def test_a_run_without_a_checkpoint_says_when_the_first_is_written(
    tmp_path: Path,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    says: str,
) -> None:
    """The first validation is the best so far, and saved; null and 0 are never."""
    monkeypatch.setenv("GPT_ROOT", str(tmp_path))
    _, err = run(code=2)
    assert "python train.py" in err
    (tmp_path / "runs" / "young").mkdir(parents=True)
    config = "".join(f"  {key}: {value}\n" for key, value in settings.items())
    (tmp_path / "runs" / "young" / "config.yaml").write_text(f"trainer:\n{config}")
    for args in (["young"], []):
        _, err = run(*args, code=2)
        assert "young" in err and f"the first is written {says}\n" in err
    _, err = run("yuong", code=2)
    assert "yuong" in err and "young" in err  # what there is instead


@pytest.mark.parametrize("name", ["model.safetensors", "vocab.json", "config.json", "state.json"])
def test_an_altered_file_is_named(trained: Path, run: Any, name: str) -> None:
    """And of a run, passed over for the checkpoint before; all damaged, there is no text."""
    checkpoints = trained / "runs" / "mine" / "checkpoints"
    file = checkpoints / "latest" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    for damaged in (raw, raw[: len(raw) // 2], b""):
        file.write_bytes(damaged)
        assert name in run(str(file.parent), code=2)[1]
        assert name in run(str(file.parent.resolve()), code=2)[1]
    for args in (["mine"], [], [str(checkpoints.parent)]):
        out, err = run(*args, "--temperature", "0")
        warning, facts, *_ = err.splitlines()
        assert out == b"best\n" and "step_00000100, step 100, " in facts
        assert warning.startswith("warning: ") and f"step_00000200/{name} " in warning
        assert warning.endswith(f"; going back to {checkpoints / 'step_00000100'}")
    (checkpoints / "step_00000100" / name).write_bytes(b"")
    assert name in run("mine", code=2)[1]


def test_damaged_moments_matter_to_training_alone(trained: Path, run: Any) -> None:
    newest = trained / "runs" / "mine" / "checkpoints" / "step_00000200"
    (newest / folders.MOMENTS).write_bytes(b"")
    out, err = run("mine", "--temperature", "0")
    assert out == b"latest\n" and "warning" not in err


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "vocab.json"])
def test_pickles_are_refused(tmp_path: Path, run: Any, name: str) -> None:
    """Whatever file the pickle poses as, it isn't run."""
    canary = tmp_path / "canary"

    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (canary,))

    bomb = pickle.dumps(Canary())
    pickle.loads(bomb)  # it does work
    assert canary.exists()
    canary.unlink()

    where = save(tmp_path / "model", tiny(257), load_tokenizer("byte"))
    if name == "pytorch_model.bin":
        (where / "model.safetensors").unlink()
    (where / name).write_bytes(bomb)
    _, err = run(str(where), code=2)
    assert not canary.exists()
    assert {"pytorch_model.bin": "pickle", "vocab.json": "tokenizer"}.get(name, name) in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-k", "-5"], "top_k"),
        (["--top-k", "2.5"], "--top-k"),
        (["--top-p", "0"], "top_p"),
        (["--num-samples", "0"], "--num-samples"),
        (["--max-new-tokens", "-3"], "--max-new-tokens"),
        (["--stop", ""], "--stop"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt"),
        (["--prompt", "a", "-"], "--prompt"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--prompt"], "--prompt=VALUE; see python sample.py --help"),
        (["--prompt", "-dash"], "--prompt=VALUE"),
        (["--stop", "-dash"], "--stop=VALUE"),
        (["another"], "another"),
        (["-", "-"], "one prompt"),
        (["--temp", "1"], "--temp"),
        (["--device", "cuda:7"], "--device auto"),
        (["--device", "tpu"], "tpu"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    assert command([str(folder), *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err


def test_a_prompt_that_is_no_text_is_refused(folder: Path, run: Any) -> None:
    _, err = run(str(folder), "-", stdin=b"abc\xff", code=2)
    assert "standard input is not UTF-8 at byte 3" in err


@pytest.mark.timeout(120)
def test_the_command_in_a_plain_locale_with_a_closed_pipe(folder: Path) -> None:
    """As a process: the locale changes no byte, and `| head` ends it without a traceback."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-W", "error", str(ROOT / "sample.py"), str(folder)]
    command += ["--seed", "1", "--device", "cpu"]
    whole = subprocess.run(
        [*command, "--prompt", "é漢", "--max-new-tokens", "3", "--dtype", "float32"],
        env=plain,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert whole.returncode == 0 and whole.stdout.startswith("é漢".encode()), whole.stderr
    with subprocess.Popen(
        [*command, "--num-samples", "500", "--max-new-tokens", "100", "--dtype", "float32"],
        env=plain,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert b"Traceback" not in process.stderr.read()


def test_nothing_waits_for_a_needless_import(folder: Path) -> None:
    """Each of these costs seconds; none is needed to sample, nor torch for --help."""
    code = """
import sys
import sample
names = lambda: print(*sorted({m.partition('.')[0] for m in sys.modules}), file=sys.stderr)
try:
    sample.main(["--help"])
except SystemExit:
    names()
sample.main([sys.argv[1], "--max-new-tokens", "1"])
names()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    )
    for_help, *_, for_text = (set(line.split()) for line in ran.stderr.splitlines())
    assert not for_help & {"torch", "numpy"} and "torch" in for_text
    assert not for_text & {"transformers", "datasets", "wandb", "hydra", "omegaconf", "pandas"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", [["sample.py"], ["-m", "tools.explore", "--text", "a"]])
def test_a_signal_while_torch_is_imported_is_one_line(
    tmp_path: Path, what: list[str], number: signal.Signals
) -> None:
    """In place of torch stands what says that its import has begun."""
    (tmp_path / "torch.py").write_text("print('now', flush=True)\nimport time\ntime.sleep(0.5)\n")
    with subprocess.Popen(
        [sys.executable, *what],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "now\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + number, "stopped\n")


def test_memory_that_runs_out_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: Any, **__: Any) -> Any:
        return torch.empty(2**60)  # of the allocator: DefaultCPUAllocator: can't allocate memory

    monkeypatch.setattr(generate, "stream", too_much)
    assert command([str(folder), "--device", "cpu", "--seed", "1"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cpu ran out of memory; the text ends here; free some")
