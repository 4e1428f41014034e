"""The config: what ships composes, sizes are the published ones, mistakes get one line."""

import functools
import shutil
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import train
from conf.cli import compose_and_run, merge_overrides
from conf.schema import Config, register, to_config

CONF = Path(train.__file__).parent / "conf"
MODELS = sorted(p.stem for p in (CONF / "model").glob("*.yaml"))
DATA = sorted(p.stem for p in (CONF / "data").glob("*.yaml") if p.stem != "common")
EXPERIMENTS = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))
NEEDED = {"text": ["data.path=x.txt"], "hf": ["data.name=x"], "tokens": ["data.path=x"]}

# Layers, heads, channels, positions: Radford et al. 2019, table 2, with the parameter counts of
# the released models (124, 355, 774 and 1,558 million).
PUBLISHED = {
    "gpt2_124m": (12, 12, 768, 1024, 124_439_808),
    "gpt2_350m": (24, 16, 1024, 1024, 354_823_168),
    "gpt2_774m": (36, 20, 1280, 1024, 774_030_080),
    "gpt2_1558m": (48, 25, 1600, 1024, 1_557_611_200),
}


@functools.cache
def composed(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_keeps_its_shape_under_every_experiment(experiment: str, model: str) -> None:
    data = ["data=sotu"]
    config = to_config(composed(f"experiment={experiment}", f"model={model}", *data))
    alone = to_config(composed("experiment=none", f"model={model}"))
    shape = ("n_layer", "n_head", "n_embd", "block_size")
    assert [getattr(config.model, k) for k in shape] == [getattr(alone.model, k) for k in shape]
    if model in PUBLISHED:
        assert tuple(getattr(config.model, k) for k in shape) == PUBLISHED[model][:4]


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_parameter_counts(model: str) -> None:
    import torch

    from gpt.model import GPT

    config = to_config(composed(f"model={model}")).model
    config.vocab_size = 50257
    with torch.device("meta"):
        assert GPT(config).n_params() == PUBLISHED[model][4]


@pytest.mark.parametrize(
    ("model", "data"), [*((m, "sotu") for m in MODELS), *(("tiny", d) for d in DATA if d != "sotu")]
)
def test_every_model_and_data_start_with_no_other_key(data: str, model: str) -> None:
    config = to_config(composed(f"model={model}", f"data={data}", *NEEDED.get(data, [])))
    config.trainer.check_batch(config.model.block_size, world_size=1)
    assert config.optimizer.lr > 0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_every_schedule_composes(schedule: str) -> None:
    assert to_config(composed(f"schedule={schedule}")).schedule.warmup_steps > 0


@pytest.mark.parametrize("written", ["6e-4", "1e-05", "1E-4", ".5e-3", "1"])
def test_a_float_is_a_float_however_it_is_written(written: str) -> None:
    lr = to_config(composed(f"optimizer.lr={written}")).optimizer.lr
    assert isinstance(lr, float) and lr == float(written)


def test_a_float_in_a_file_is_a_float_however_it_is_written(tmp_path: Path) -> None:
    """YAML takes 6e-4, without a point, for a text."""
    shutil.copytree(CONF, tmp_path / "conf", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    recipe = "# @package _global_\noptimizer:\n  lr: 6e-4\n"
    assert yaml.safe_load(recipe) == {"optimizer": {"lr": "6e-4"}}
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(recipe)
    register()
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        lr = to_config(compose("train", ["experiment=mine"])).optimizer.lr
    assert isinstance(lr, float) and lr == 6e-4


REFUSED = [  # the override, and what the line must name
    ("trainer.lrr=1e-3", "trainer.lrr is no setting"),
    ("+trainer.lrr=1e-3", "trainer.lrr is no setting"),
    ("+foo=1", "foo is no setting"),
    ("models=tiny", "did you mean model"),
    ("trainer.max_step=5", "did you mean trainer.max_steps"),
    ("trainer.lrr=1e-3", "did you mean optimizer.lr?"),
    ("schedule.decay_fraction=0.5", "belongs to schedule=wsd"),
    ("trainer.max_steps=ten", "trainer.max_steps: Value 'ten'"),
    ("model.n_layer=2.5", "model.n_layer: Value '2.5'"),
    ("runtime.dtype=half", "float32, bfloat16"),
    ("--trainer.lr=1e-3", "settings have no dashes"),
    ("model=big", "gpt2_124m"),
    ("data=text", "data.path is not set"),
    ("data.path=a(b", "can't be parsed"),
    ("data.path=my books=1, [x]", "can't be parsed"),
    ("trainer.batch_tokens=100000000000", "batch_tokens=100000000000 is above 1073741824"),
    ("trainer=null", "Config group override must be a string"),
    ("model.n_head=3", "model.n_embd=128 is not divisible by model.n_head=3"),
    ("model.n_head=0", "model.n_head=0"),
    ("model.attn_dropout=1.5", "model.attn_dropout=1.5"),
    ("trainer.batch_tokens=16", "not a multiple of 1024"),
    ("trainer.micro_batch_size=0", "trainer.micro_batch_size=0"),
    ("optimizer.lr=-1", "optimizer.lr=-1"),
    ("optimizer.beta2=1", "optimizer.beta2=1"),
    ("schedule.min_lr_ratio=2", "schedule.min_lr_ratio=2"),
    ("runtime.device=gpu", "runtime.device=gpu"),
    ("runtime.compile=maybe", "runtime.compile=maybe"),
    ("runtime.compile=1", "runtime.compile=1 is none of"),
    ("schedule.decay_steps=-1", "schedule.decay_steps=-1 is negative"),
    ("trainer.log_every=-1", "trainer.log_every=-1 is negative"),
    ("trainer.grad_clip=inf", "trainer.grad_clip=inf is no finite number"),
    ("optimizer.weight_decay=nan", "optimizer.weight_decay=nan is no finite number"),
    ("run=a/b", "run='a/b'"),
    ("run=a b", "run='a b'"),
    ("hello", "settings are key=value"),
    ("--helo", "see --help"),
]


@pytest.mark.parametrize(("override", "says"), REFUSED)
def test_a_mistake_gets_one_line_before_any_work(override: str, says: str) -> None:
    """Fact; consequence; remedy."""

    def never(config: Config, overrides: list[str]) -> int:
        raise AssertionError("work was started")

    with pytest.raises(ValueError) as caught:
        compose_and_run(never, [override])
    message = str(caught.value)
    assert says in message
    assert message.count(";") >= 2 and "\n" not in message


def test_later_overrides_replace_earlier_ones_of_the_same_key() -> None:
    stored, given = ["model=tiny", "trainer.seed=1"], ["trainer.seed=2", "+x.y=1"]
    assert merge_overrides(stored, given) == ["model=tiny", "trainer.seed=2", "+x.y=1"]


def test_jobs_of_a_sweep_have_names_of_their_own(tmp_path: Path) -> None:
    seen = []

    def note(config: Config, overrides: list[str]) -> int:
        seen.append((config.run, config.optimizer.lr))
        assert overrides[-1] == f"run={config.run}"
        return 0

    root = f"paths.root={tmp_path}"
    assert compose_and_run(note, ["-m", "run=x", "optimizer.lr=1e-3,1e-4", root]) == 0
    assert seen == [("x_0", 1e-3), ("x_1", 1e-4)]


def test_help_names_every_option() -> None:
    text = (CONF / "train.yaml").read_text(encoding="utf-8").partition("template:")[2]
    named = set(text.split())
    for group in ("experiment", "model", "data", "optimizer", "schedule"):
        options = {p.stem for p in (CONF / group).glob("*.yaml")} - {"common"}
        assert options <= named, options - named


@pytest.mark.parametrize("name", ["1_0", "1e3", "007", "2.50", "true"])
def test_a_name_that_looks_like_a_number_stays_a_name(name: str) -> None:
    seen = []

    def look(config: Config, overrides: list[str]) -> int:
        seen.append((config.run, config.paths.root, config.trainer.seed))
        return 0

    compose_and_run(look, [f"run={name}", f"paths.root={name}", "trainer.seed=1_0"])
    assert seen == [(name, name, 10)]


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_the_whole_config_is_shown(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["model=tiny", *flags]) == 0
    shown = capsys.readouterr().out
    assert "batch_tokens: 512" in shown and "n_embd: 64" in shown
