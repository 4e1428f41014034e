"""Text from a trained GPT-2:  python sample.py [RUN | CHECKPOINT | HF_FOLDER] [--prompt TEXT]

Standard output carries the text and nothing else; what was loaded, the seed and notices go to
standard error. Without a positional argument the newest run is taken, without a prompt the model
starts a document of its own.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from conf.door import Parser, door, memory_told
from gpt.config import Attention, DType, Parallel, RuntimeConfig
from gpt.folders import default_root, read_state
from gpt.stopping import held_back

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer
    from gpt.model import GPT
    from gpt.runtime import Runtime

# Everything that can act on a terminal: C0 but tab and newline, DEL, and C1 (0x9b starts escapes).
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Text:
    """Iterates over the text of `ids` in pieces that are whole characters, as soon as they are.

    Bytes that are no UTF-8 become U+FFFD; a character still unfinished at the end is left out. The
    text ends before the first of `stops` to be complete, even one that comes in several tokens:
    what could be the beginning of one is held back. Afterwards `ids` has what was read, and
    `stopped` says whether a stop ended it.
    """

    def __init__(
        self,
        ids: Iterator[int],
        decode_bytes: Callable[[list[int]], bytes],
        stops: Sequence[str] = (),
    ) -> None:
        self.ids: list[int] = []
        self.stopped = False
        self._source, self._decode_bytes, self._stops = ids, decode_bytes, stops

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        held = ""
        for token in self._source:
            self.ids.append(token)
            held += decoder.decode(self._decode_bytes([token]))
            found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
            if found:
                self.stopped = True
                held = held[: min(found)[1]]
                break
            keep = max((_overlap(held, stop) for stop in self._stops), default=0)
            if len(held) > keep:
                yield held[: len(held) - keep]
                held = held[len(held) - keep :]
        if held:
            yield held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` could be the beginning of `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )


def main(argv: list[str]) -> int:
    run(_parse(argv))
    return 0


def run(args: argparse.Namespace) -> None:
    with held_back():  # torch is loaded here, after the arguments were found good
        from gpt.generate import check_settings

    check_settings(args.temperature, args.top_k, args.top_p)
    prompt, stops = _prompt(args), [_text(stop, "--stop") for stop in args.stop]
    runtime = _runtime(args)
    with memory_told(
        lambda: (
            f"{runtime.device} ran out of memory; the text ends here; free some, choose a "
            "smaller model, or another --device"
        )
    ):
        _generate(args, runtime, prompt, stops)


def _runtime(args: argparse.Namespace) -> Runtime:
    from gpt import runtime

    config = RuntimeConfig(
        device=args.device,
        dtype=DType(args.dtype),
        compile=False,
        attention=Attention.flash,
        deterministic=False,
        parallel=Parallel.ddp,
        activation_checkpointing=False,
        hang_minutes=None,
        peak_flops=None,
    )
    try:
        return runtime.resolve(config)
    except ValueError as e:
        raise ValueError(re.sub(r"runtime\.(device|dtype)=", r"--\1 ", str(e))) from e


def _generate(args: argparse.Namespace, runtime: Runtime, prompt: str, stops: list[str]) -> None:
    from data.tokenizer import load_tokenizer
    from gpt.checkpoint import load_named

    say = partial(print, file=sys.stderr)

    # First: it verifies the tokenizer's files too.
    folder, model = load_named(args.checkpoint, default_root(), runtime.device, say)
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > model.vocab_size:  # more embeddings than ids are never chosen
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.n_vocab} tokens and the model "
            f"{model.vocab_size}; they belong to different vocabularies; put the tokenizer files "
            "that the model was trained with into its folder"
        )
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    state = read_state(folder) or {}
    facts = {
        "checkpoint": str(folder),
        "step": state.get("step"),
        "val_loss": state.get("val_loss"),
        "val_step": state.get("val_step"),
    }
    for line in _notices(facts, seed, runtime.notes if args.dtype != "auto" else []):
        print(line, file=sys.stderr)
    ids = tokenizer.encode(prompt) or [tokenizer.eot]
    if len(ids) > model.config.block_size:
        print(
            f"the prompt has {len(ids)} tokens and the context {model.config.block_size}: "
            "the model sees the end of it",
            file=sys.stderr,
        )
    out = Out(sys.stdout)
    with runtime.autocast():
        for sample in range(args.num_samples):
            text = _sample(model, tokenizer, ids, stops, seed, sample, args)
            if args.json:
                new = "".join(text)
                ended = "eot" if len(text.ids) < args.max_new_tokens else "length"
                out.json(
                    {
                        **facts,
                        "seed": seed,
                        "sample": sample,
                        "prompt": prompt,
                        "text": prompt + new,
                        "prompt_tokens": len(ids),
                        "new_tokens": len(text.ids),
                        "ended_by": "stop" if text.stopped else ended,
                    }
                )
                continue
            if sample:
                out.write("---\n")
            out.write(prompt)
            for piece in text:
                out.write(piece)
            out.write("\n")


def _sample(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    stops: list[str],
    seed: int,
    sample: int,
    args: argparse.Namespace,
) -> Text:
    import torch

    from gpt.generate import stream

    idx = torch.tensor([prompt[-model.config.block_size :]], device=model.wte.weight.device)
    ids = stream(
        model,
        idx,
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        args.top_p,
        seed,
        eot=tokenizer.eot,
        sample=sample,
        n_vocab=tokenizer.n_vocab,
    )
    return Text(ids, tokenizer.decode_bytes, stops)


class Out:
    """Standard output: UTF-8 to a file or pipe, byte for byte; on a terminal nothing that acts."""

    def __init__(self, stdout: TextIO) -> None:
        self.stdout, self.terminal = stdout, stdout.isatty()
        reconfigure = getattr(stdout, "reconfigure", None)
        if reconfigure is not None:
            if not self.terminal:
                reconfigure(encoding="utf-8", newline="\n")
            reconfigure(errors="replace")  # for a terminal that lacks a character

    def write(self, text: str) -> None:
        self.stdout.write(_CONTROL.sub("\ufffd", text) if self.terminal else text)
        self.stdout.flush()

    def json(self, record: dict[str, Any]) -> None:
        """An object a line; escaped on a terminal, since JSON leaves C1 controls as they are."""
        self.stdout.write(json.dumps(record, ensure_ascii=self.terminal) + "\n")
        self.stdout.flush()


def _notices(facts: dict[str, Any], seed: int, notes: list[str]) -> Iterator[str]:
    known = [f"step {facts['step']}"] if facts["step"] is not None else []
    if facts["val_loss"] is not None:
        at = facts["val_step"]  # of the newest evaluation, which may be older than the weights
        at = "" if at in (None, facts["step"]) else f" at step {at}"
        known.append(f"val loss {facts['val_loss']:.4f}{at}")
    yield ", ".join([facts["checkpoint"], *known])
    yield from notes
    yield f"seed {seed}"


def _prompt(args: argparse.Namespace) -> str:
    if args.stdin:
        return _utf8(sys.stdin.buffer.read(), "standard input")
    if args.prompt_file is not None:
        return _utf8(Path(args.prompt_file).read_bytes(), args.prompt_file)
    return _text(args.prompt or "", "--prompt")


def _text(argument: str, name: str) -> str:
    """An argument's own bytes as UTF-8, whatever the locale made of them."""
    return _utf8(os.fsencode(argument), name)


def _utf8(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 at byte {error.start}; the tokenizer reads text; convert it "
            "to UTF-8 first"
        ) from None


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty text would stop before the first token")
    return text


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python sample.py",
        usage="python sample.py [RUN|CHECKPOINT|HF_FOLDER] [--prompt TEXT | --prompt-file F | -] "
        "[options]",
        description="Text from a trained GPT-2, streamed to standard output.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("what", nargs="*", metavar="RUN|CHECKPOINT|HF_FOLDER", help="left out: the newest run")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="left out: a document starts")
    prompt.add_argument("--prompt-file", metavar="F", help="byte for byte, as - (standard input)")
    add("--num-samples", type=_count, default=1, metavar="N", help="how many texts: %(default)s")
    add(
        "--max-new-tokens",
        type=_count,
        default=200,
        metavar="N",
        help="length of each: %(default)s",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="%(default)s; 0: the likeliest always",
    )
    add(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="keep the K likeliest: %(default)s; 0: all",
    )
    add("--top-p", type=float, metavar="P", help="keep the likeliest up to this probability")
    add("--seed", type=int, metavar="S", help="left out: a new one, printed")
    add("--stop", type=_stop, action="append", default=[], metavar="TEXT", help="repeatable")
    add("--device", default="auto", metavar="D", help="auto, cpu, cuda, cuda:N, mps")
    add("--dtype", choices=[d.value for d in DType], default="auto")
    add("--json", action="store_true", help="an object a line")
    args = parser.parse_intermixed_args(argv)
    args.stdin = "-" in args.what
    places = [what for what in args.what if what != "-"]
    if len(args.what) - len(places) > 1 or len(places) > 1:
        parser.error(f"one checkpoint and one prompt are taken, not {' '.join(args.what)}")
    if args.stdin and (args.prompt is not None or args.prompt_file is not None):
        parser.error("argument -: not allowed with --prompt or --prompt-file")
    args.checkpoint = places[0] if places else None
    return args


if __name__ == "__main__":
    door(main, "nothing was generated", shows=True)
