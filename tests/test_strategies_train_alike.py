"""What trains, and how much, is the same under every strategy: as in a loop of plain PyTorch, which
shares no code with the package.

Every step reads all rows of a dataset, so that their order doesn't matter.
"""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import COMMON, CONTEXT
from ranks import train_ranks
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
)

from fabric_llm.model.capabilities import plain_attention
from fabric_llm.model.loading import load_config
from fabric_llm.weights.export import export

ROWS, STEPS, LR, DECAY = 4, 3, 1e-2, 0.1
EMBEDDINGS = ("embed_tokens", "lm_head")
RARE = 125  # a token that none of the package's probes holds


class OftenIdleConfig(LlamaConfig):
    model_type = "often_idle"


class OftenIdle(LlamaForCausalLM):
    """A Llama with a matrix that only rows with the token RARE use."""

    config_class = OftenIdleConfig

    def __init__(self, config):
        super().__init__(config)
        self.rare = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **more):
        outputs = self.model(input_ids=input_ids, **more)
        logits = self.lm_head(outputs.last_hidden_state)
        if (input_ids == RARE).any():
            logits = logits + self.rare(outputs.last_hidden_state)
        outputs.logits = logits
        return outputs


AutoConfig.register("often_idle", OftenIdleConfig)
AutoModelForCausalLM.register(OftenIdleConfig, OftenIdle)
# Without another name of the module, files would name their code.
OftenIdleConfig.__module__ = OftenIdle.__module__ = "transformers.of_this_test"


def gemma3() -> Gemma3Config:
    """With a vision tower, which no text uses."""
    text = {**COMMON, "head_dim": 8}
    vision = {**COMMON, "num_hidden_layers": 1, "hidden_size": 16}
    vision |= {"image_size": 16, "patch_size": 8, "vision_use_head": False}
    tokens = {"image_token_index": 130, "boi_token_index": 128, "eoi_token_index": 129}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)


def falcon() -> FalconConfig:
    """With ALiBi, which transformers' eager attention adds twice, and its default, SDPA, once."""
    return FalconConfig(**COMMON, alibi=True, new_decoder_architecture=False)


@pytest.fixture(scope="module")
def made(toys, tmp_path_factory):
    """A folder with models and a dataset of ROWS rows."""
    folder = tmp_path_factory.mktemp("alike")
    configs = {"gemma3": gemma3(), "often_idle": OftenIdleConfig(**COMMON), "falcon": falcon()}
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    (folder / "llama").symlink_to(toys / "llama")
    (folder / "tied").symlink_to(toys / "llama-tied")
    rows = np.random.default_rng(0).integers(1, 120, (ROWS, CONTEXT))
    rows[:, 5] = RARE
    split = datasets.Dataset.from_dict({"input_ids": rows.tolist()})
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(folder / "data"))
    return folder


def rows_of(folder: Path) -> torch.Tensor:
    return torch.tensor(datasets.load_from_disk(str(folder))["train"]["input_ids"])


def plain(
    model_folder: Path, data: Path, frozen: tuple[str, ...] = (), attention: str = "eager"
) -> dict[str, torch.Tensor]:
    """The weights after STEPS steps of a loop as in a textbook. frozen: names in those of frozen
    parameters."""
    of_files = {"dtype": torch.float32, "attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(model_folder, **of_files).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(word in name for word in frozen))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    ids = rows_of(data)
    for _ in range(STEPS):
        logits = model(input_ids=ids).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def by_train_py(
    model_folder: Path, data: Path, output: Path, ranks: int, *more: object
) -> dict[str, torch.Tensor]:
    """The weights after STEPS steps of train.py, as transformers reads them."""
    folders = ("--model_name", model_folder, "--train_data_dir", data, "--output_dir", output)
    words = f"--run_name run --max_step {STEPS} --number_epochs {STEPS} --global_batch_size {ROWS} "
    words += f"--micro_batch_size 2 --lr {LR} --lr_decay false --warmup_steps 0 --eval_iters 0 "
    words += f"--weight_decay {DECAY} --precision 32-true"
    train_ranks(ranks, *folders, *words.split(), *more)
    folder = output / "run" / f"step-{STEPS:08d}"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters())


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    worst = {
        name: ((found[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)).item()
        for name in expected
    }
    name = max(worst, key=worst.__getitem__)
    assert worst[name] < 5e-4, f"{name} differs by {worst[name]:.1g} of its norm"


def often(value, *others):
    """A case that the README's command runs, before those of the longer suite."""
    return [value, *(pytest.param(*other, marks=pytest.mark.longer) for other in others)]


@pytest.mark.every_eighth(0)
@pytest.mark.parametrize(
    ("ranks", "strategy"), often((2, "fsdp"), (1, "auto"), (1, "fsdp"), (2, "fsdp2"), (2, "ddp"))
)
@pytest.mark.parametrize(
    ("model", "loss"), often(("gemma3", "chunked"), ("gemma3", "full"), ("often_idle", "full"))
)
def test_what_has_no_part_in_the_loss_stays(made, tmp_path, model, loss, ranks, strategy):
    """Without a gradient there is no decay either: one device, FSDP2, FSDP1 and DDP agree."""
    more = ("--strategy", strategy, "--loss", loss)
    found = by_train_py(made / model, made / "data", tmp_path, ranks, *more)
    expected = plain(made / model, made / "data")
    before = AutoModelForCausalLM.from_pretrained(made / model)
    assert_alike(found, expected)
    idle = [name for name, p in before.named_parameters() if torch.equal(p, expected[name])]
    assert bool(idle) == (model != "often_idle")
    assert all(torch.equal(found[name], expected[name]) for name in idle)


@pytest.mark.parametrize(
    ("ranks", "strategy", "more", "frozen"),
    often(
        (2, "fsdp", "--auto_wrap_policy size:1000 --verify_start false", ()),
        (2, "fsdp", "--auto_wrap_policy size:1000", ()),
        (1, "fsdp", "--auto_wrap_policy size:1000", ()),
        (2, "fsdp2", "--auto_wrap_policy size:1000", ()),
        (2, "fsdp", "--auto_wrap_policy none --freeze embeddings", EMBEDDINGS),
        (2, "fsdp", "--auto_wrap_policy LlamaMLP --freeze *mlp.up_proj*", ("mlp.up_proj",)),
    ),
)
def test_parts_of_mlps_in_tiles_are_trained(made, tmp_path, ranks, strategy, more, frozen):
    """However a strategy would have cut an MLP, its tiles find all of its weights, and these get
    their gradients."""
    more = ("--strategy", strategy, "--tiled_mlp", "true", *more.split())
    found = by_train_py(made / "llama", made / "data", tmp_path, ranks, *more)
    assert_alike(found, plain(made / "llama", made / "data", frozen))


@pytest.mark.parametrize(
    ("model", "ranks", "more"),
    often(
        ("tied", 1, ()),
        ("llama", 1, ()),
        ("llama", 2, ("--sharding_strategy", "NO_SHARD")),
        ("tied", 2, ()),
    ),
)
def test_frozen_embeddings_of_an_unsharded_model_stay_parameters(
    made, tmp_path, model, ranks, more
):
    more = ("--strategy", "fsdp", "--freeze", "embeddings", "--eval_iters", 2, *more)
    found = by_train_py(made / model, made / "data", tmp_path, ranks, *more)
    assert_alike(found, plain(made / model, made / "data", EMBEDDINGS))


def test_a_model_whose_eager_attention_is_another_model_trains_what_opens(made, tmp_path):
    """By default, which its export opens with, and not with eager attention."""
    found = by_train_py(made / "falcon", made / "data", tmp_path, 1)
    assert_alike(found, plain(made / "falcon", made / "data", attention="sdpa"))
    [run] = (tmp_path / "run").glob("step-*")
    assert export(run, tmp_path / "hf").logits_difference < 1e-5
    model = AutoModelForCausalLM.from_pretrained(made / "falcon", dtype=torch.float32)
    assert plain_attention(model) == "sdpa"
    config = load_config(str(made / "falcon"))
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="another function with it than with sdpa"):
        plain_attention(model)
