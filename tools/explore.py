"""The attention page:  python -m tools.explore CHECKPOINT --text TEXT [--out attention.html]

Runs the ladder of gpt/attention_steps.py on a checkpoint's own weights and writes one HTML page
that needs no network and no server. The page's switches recompute in JavaScript what Python would
give; what it is made of lies in tools/explore_page.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.door import Parser, door, memory_told
from gpt.folders import default_root, read_state
from gpt.stopping import held_back

if TYPE_CHECKING:
    import torch

    from data.tokenizer import Tokenizer
    from gpt.model import GPT

PAGE = Path(__file__).parent / "explore_page"
SCRIPTS = ("ladder.js", "heat.js", "notes.js", "page.js")
MAX_TOKENS = 64
# Of vectors as wide as the model only so many columns are carried where the page does not compute
# with them: all of out_proj's weights would be 28 MB for GPT-2 small.
COLUMNS = 8


def main(argv: list[str]) -> int:
    args = _parse(argv)
    with held_back():  # torch is loaded here, after the arguments were found good
        import torch  # noqa: F401
    with memory_told(
        lambda: "memory ran out; no page was written; free some, or choose a smaller model"
    ):
        run(args)
    return 0


def run(args: argparse.Namespace) -> None:
    from data.tokenizer import load_tokenizer
    from gpt.checkpoint import load_named
    from gpt.model import GPT

    text = _utf8(args.text)
    say = partial(print, file=sys.stderr)
    folder, model = load_named(args.checkpoint, default_root(), "cpu", say)
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > model.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {tokenizer.n_vocab} tokens and the model "
            f"{model.vocab_size}; they belong to different vocabularies; put the tokenizer files "
            "that the model was trained with into its folder"
        )
    name, step = _origin(folder)
    if args.untrained:
        model, step = GPT(model.config).eval(), None
    data = page_data(model, tokenizer, text, args.layer, args.head)
    name += ", untrained" if args.untrained else f", step {step:,}" if step is not None else ""
    page = render({**data, "name": name, "untrained": args.untrained})
    args.out.write_text(page, encoding="utf-8", newline="\n")
    size = args.out.stat().st_size / 1e6
    print(f"{args.out}: {len(data['tokens'])} tokens, {name}, {size:.1f} MB; open it in a browser")


def page_data(
    model: GPT, tokenizer: Tokenizer, text: str, layer: int | None = None, head: int | None = None
) -> dict[str, Any]:
    """Everything the page computes from, for `text` in `model` (in eval mode, on the CPU).

    `layer` and `head` are what is shown first; both None leaves it to the page. Raises ValueError
    where there is no such layer or head, no text, or more of it than the page or the model takes.
    """
    import torch

    from gpt import attention_steps as steps

    config = model.config
    for what, chosen, count in (("layer", layer, config.n_layer), ("head", head, config.n_head)):
        if chosen is not None and not 0 <= chosen < count:
            raise ValueError(
                f"there is no {what} {chosen}; the model's {what}s are counted from 0 to "
                f"{count - 1}; choose one of them"
            )
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("the text is empty; there is nothing to look at; give one to --text")
    if len(ids) > min(MAX_TOKENS, config.block_size):
        whose = "page shows" if config.block_size >= MAX_TOKENS else "model has positions for"
        raise ValueError(
            f"the text has {len(ids)} tokens and the {whose} {min(MAX_TOKENS, config.block_size)};"
            " its matrices would not be readable or not exist; shorten it"
        )
    idx = torch.tensor(ids)
    state = {k: v.detach() for k, v in model.state_dict().items()}
    zero = torch.zeros_like(state["wpe.weight"])
    x = steps.embed(idx, state["wte.weight"], state["wpe.weight"])
    layers = []
    for n, normed in enumerate(_block_inputs(model, idx)):
        w_q, w_k, w_v = state[f"h.{n}.attn.c_attn.weight"].mT.chunk(3, dim=-1)
        b_q, b_k, b_v = state[f"h.{n}.attn.c_attn.bias"].chunk(3)
        q, k, _ = steps.queries_keys(normed, w_q, w_k, b_q, b_k)
        packed = {
            "x": normed[:, :COLUMNS],
            "q": q,
            "k": k,
            "v": steps.values(normed, w_v, b_v),
            "shared": x @ w_q,  # step 3 of every head: its own columns
            "w_o": state[f"h.{n}.attn.c_proj.weight"].mT[:, :COLUMNS],
            "b_o": state[f"h.{n}.attn.c_proj.bias"][:COLUMNS],
        }
        layers.append({key: _pack(value) for key, value in packed.items()})
    C, H = config.n_embd, config.n_head
    return {
        "meta": f"{config.n_layer} layers of {H} heads · {C} wide, {C // H} a head · "
        f"{len(ids)} tokens of at most {config.block_size:,}",
        "config": {"n_layer": config.n_layer, "n_head": H, "n_embd": C},
        "n_out": min(COLUMNS, C),
        "ids": ids,
        "tokens": [_label(tokenizer.decode_bytes([i])) for i in ids],
        "layer": layer,
        "head": head,
        "p": config.attn_dropout or 0.1,
        "token": _pack(steps.embed(idx, state["wte.weight"], zero)),
        "position": _pack(x - x + state["wpe.weight"][: len(ids)]),
        "layers": layers,
        "sources": {
            str(number): [{"name": f.__name__, "code": _source(f)} for f in functions]
            for number, (_, functions) in enumerate(steps.STEPS, start=1)
        },
    }


def render(data: dict[str, Any]) -> str:
    """The page as one text. `data`: what page_data gives, with a `name` and `untrained`."""
    # In a script element only "<" can end what is data; in JSON it may be written by its number.
    packed = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    parts = {
        "/*CSS*/": (PAGE / "page.css").read_text(encoding="utf-8"),
        "/*JS*/": "\n".join((PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "/*DATA*/": packed,
    }
    for marker, part in parts.items():
        before, after = page.split(marker)  # the user's text goes in last and is never searched
        page = before + part + after
    return page


def _block_inputs(model: GPT, idx: torch.Tensor) -> list[torch.Tensor]:
    """What each block's attention gets: the output of its ln_1, [T, C] each."""
    import torch

    seen: list[torch.Tensor] = []
    hooks = [
        model.get_submodule(f"h.{n}.ln_1").register_forward_hook(
            lambda module, inputs, output: seen.append(output[0])
        )
        for n in range(model.config.n_layer)
    ]
    try:
        with torch.no_grad():
            model.trunk(idx[None])
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _pack(tensor: torch.Tensor) -> str:
    """Little-endian float32, row after row, in base64."""
    return base64.b64encode(tensor.contiguous().numpy().astype("<f4").tobytes()).decode("ascii")


def _source(function: object) -> str:
    code = inspect.getsource(function)  # type: ignore[arg-type]
    imports = "from collections.abc import Callable\n\n" if "Callable" in code else ""
    return f"{imports}import torch\n\n\n{code}"


def _label(token: bytes) -> str:
    """A token as it is shown: spaces and line breaks visible, bytes that are no text as hex."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in token)
    text = text.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else f"U+{ord(c):04X}" for c in text)


def _origin(folder: Path) -> tuple[str, int | None]:
    """The run's or folder's name, and the step where one is known."""
    step = (read_state(folder) or {}).get("step")
    in_run = folder.parent.name == "checkpoints"
    return (folder.parent.parent.name if in_run else folder.resolve().name), step


def _utf8(argument: str) -> str:
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text is not UTF-8 at byte {error.start}; the tokenizer reads text; convert it"
        ) from None


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.explore",
        description="A page on which one sees a GPT-2's attention work, step by step.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", metavar="CHECKPOINT", help="a checkpoint or Hugging Face GPT-2 "
        "folder, or the name of a run; default: the newest run")  # fmt: skip
    add("--text", required=True, help=f"what the model reads, up to {MAX_TOKENS} tokens")
    add("--out", type=Path, default=Path("attention.html"), metavar="FILE")
    add("--layer", type=int, metavar="N", help="shown first, counted from 0")
    add("--head", type=int, metavar="N", help="shown first, counted from 0")
    add("--untrained", action="store_true", help="the same shape with a run's first weights, to "
        "compare with")  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    door(main, "no page was written", shows=True)
