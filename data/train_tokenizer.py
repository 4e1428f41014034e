"""A byte-level BPE of one's own: python -m data.train_tokenizer data=… vocab_size=… [out=FOLDER]

Trained on the documents of any source by rustbpe, and saved in GPT-2's format: use it with
data.tokenizer=FOLDER.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from data.say import terminal
from data.sources import MixConfig, TokensConfig, dataset_name, documents
from data.tokenizer import EOT, SPLIT_PATTERN, Tokenizer, replace_surrogates

if TYPE_CHECKING:
    from conf.schema import Config


def train_tokenizer(texts: Iterable[str], vocab_size: int, name: str) -> Tokenizer:
    """A tokenizer of `vocab_size` ids: 256 bytes, the merges that `texts` suggest, and EOT last.

    A small corpus has fewer merges to give; the vocabulary is then smaller. Raises ValueError for a
    size that leaves no merge.
    """
    if vocab_size < 258:
        raise ValueError(
            f"vocab_size={vocab_size} leaves no room beside 256 bytes and the separator; nothing "
            "could be learned; give at least 258, or use data.tokenizer=byte"
        )
    try:
        import rustbpe  # type: ignore[import-untyped]
    except ImportError as e:
        raise ValueError(
            "the package rustbpe is not installed; tokenizers are trained with it; "
            "pip install rustbpe"
        ) from e
    trainer = rustbpe.Tokenizer()
    whole = (replace_surrogates(text) for text in texts)
    trainer.train_from_iterator(whole, vocab_size - 1, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return Tokenizer(name, ranks, {EOT: len(ranks)}, None)


def main(argv: list[str]) -> int:
    """The command: train.py's configuration, and two settings of its own."""
    from conf.cli import compose_and_run

    own = dict(a.split("=", 1) for a in argv if a.startswith(("vocab_size=", "out=")))
    rest = [a for a in argv if not a.startswith(("vocab_size=", "out="))]

    def run(config: "Config", overrides: list[str]) -> int:
        if "vocab_size" not in own or not own["vocab_size"].isdigit():
            raise ValueError(
                f"vocab_size is {own.get('vocab_size', 'not set')}; it is the number of ids to "
                "have; give it, for instance vocab_size=8192"
            )
        if isinstance(config.data, TokensConfig | MixConfig):
            raise ValueError(
                "ready tokens have no text; a tokenizer is trained on text; give a source with text"
            )
        size = int(own["vocab_size"])
        name = f"{dataset_name(config.data)}-{size}"
        out = Path(own.get("out") or Path(config.paths.root) / "tokenizers" / name)

        def texts() -> Iterable[str]:
            for number, (_, text) in enumerate(documents(config.data, log), 1):
                if number % 10_000 == 0:
                    (live or log)(f"tokenizer: {number:,} documents")
                yield text

        with terminal() as (log, live):
            tokenizer = train_tokenizer(texts(), size, name)
            tokenizer.save(out)
            log(f"tokenizer: {tokenizer.n_vocab:,} ids in {out}; use it with data.tokenizer={out}")
            if tokenizer.n_vocab < size:
                log(f"tokenizer: the text has no more to merge, so not the {size:,} asked for")
        return 0

    return compose_and_run(run, rest)


if __name__ == "__main__":
    from conf.door import door

    door(main, "no tokenizer was written")
