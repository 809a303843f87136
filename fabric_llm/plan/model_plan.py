"""Flags -> ModelPlan: the model that a run trains, and whether it fits its data and can do what the
flags ask for.

Each check raises ValueError in one sentence with the offending value. A check whose result is the
same on all ranks is made on rank 0 only.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import MOST_NAMED, command
from fabric_llm.checkpoint import keep, state_dicts, whole
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.model import freezing, language_model, layers, loading, positions
from fabric_llm.model import strategy as strategies
from fabric_llm.model.attention import resolve_attention, takes_documents, takes_positions
from fabric_llm.plan import checks
from fabric_llm.plan.data_plan import differing_tokens
from fabric_llm.plan.plan import DataPlan, ModelPlan, Plan


def plan_model(flags: Flags, source: str, data: DataPlan, kind: str) -> tuple[ModelPlan, Any]:
    """(the plan of the model, the model on the meta device). kind: "cpu" or "cuda". Raises
    ValueError."""
    asked, training = flags.model, flags.training
    config = loading.load_config(source)
    datasets, rope = data.opened, ""
    # The configuration of a resumed run's checkpoint has them already.
    if asked.rope is not None and source == asked.model_name:
        config, rope = positions.scaled(config, asked.rope, data.row_lengths()[-1])
    config._attn_implementation = resolve_attention(config, asked.attention, kind)
    if is_rank_zero():
        require_rows_for(config.get_text_config(), datasets, source)
    skeleton = loading.checked_skeleton(source, config, loading.DTYPES[asked.precision])
    tokenizer = tokenizer_of(datasets, loading.tokenizer_beside(source), config, source)
    model = replace(
        model_plan(flags, config, skeleton, kind), source=source, tokenizer=tokenizer, rope=rope
    )
    # --compile auto goes on without a compiler, --compile true insists on it.
    if model.compiles and (missing := layers.no_compiler(kind)) is not None:
        if asked.compile is True:
            raise ValueError(f"--compile true: {missing}.")
        if is_rank_zero():
            print(f"Layers aren't compiled: {missing}.", flush=True)
        model = replace(model, compiles=False)
    # Only the model knows whether it has routers, and which coefficient is its default.
    coefficient = language_model.router_coefficient(skeleton, training.router_aux_loss_coef)
    if coefficient and model.tiled_mlp:
        raise ValueError(
            f"--tiled_mlp true: --router_aux_loss_coef {coefficient:g} needs what routers say of "
            "whole rows."
        )
    # Kept in checkpoints: it tells later which revision of the model the run began with.
    config_file = loading.cached_file(source, loading.CONFIG_NAME, local_files_only=True)
    # A checkpoint says itself with which file its run began.
    if (Path(source) / MANIFEST).is_file():
        config_file = keep.read_progress(Path(source)).get("config_file")
    return replace(model, router_aux_loss_coef=coefficient, config_file=config_file), skeleton


def model_plan(flags: Flags, config: Any, skeleton: Any, kind: str) -> ModelPlan:
    """What the flags alone say of how a model trains. skeleton: the model on the meta device. kind:
    of the devices."""
    asked, training = flags.model, flags.training
    recomputed = checks.activation_checkpointing(flags.fsdp.activation_checkpointing)
    # `auto` never compiles on a CPU, nor with --tiled_mlp, which excludes it.
    may_compile = asked.compile == "auto" and kind != "cpu" and not flags.fsdp.tiled_mlp
    return ModelPlan(
        name=asked.model_name,
        source=asked.model_name,
        config=config,
        tokenizer=None,
        precision=asked.precision,
        bf16_updates=asked.bf16_updates,
        float8=asked.float8,
        rope="",
        sums_in_float32=training.accumulation_dtype == "float32" and asked.precision == "bf16-true",
        router_aux_loss_coef=0.0,
        loss=asked.loss,
        activation_checkpointing=recomputed,
        tiled_mlp=flags.fsdp.tiled_mlp,
        compiles=asked.compile is True or may_compile and layers.is_worth_compiling(skeleton),
        frozen=freezing.frozen_names(skeleton, training.freeze, training.train_only),
    )


def tokenizer_of(
    datasets: Sequence[TokenDataset], of_model: Optional[Any], config: Any, source: str
) -> Optional[Any]:
    """The model's tokenizer, or else that of the first dataset that has one. Raises ValueError for
    a dataset of another."""
    tokenizer, place = of_model, source
    for dataset in datasets:
        of_data = loading.tokenizer_beside(dataset.folder / "tokenizer")
        # Where one of them has no tokenizer, there is nothing to compare.
        if None not in (tokenizer, of_data) and (differing := differing_tokens(tokenizer, of_data)):
            raise ValueError(
                f"{dataset.given!r} was made with a different tokenizer from that of "
                f"{place!r}{differing}; "
                f"make it with {command('prepare_data.py', tokenizer=place)}."
            )
        _require_known_end(dataset, of_model, config, source)
        if tokenizer is None:
            tokenizer, place = of_data, f"{dataset.given}/tokenizer"
    # Ids that mean other tokens than those it has learned would only show in the losses.
    is_unknown = of_model is None and tokenizer is not None and loading.has_weights(source)
    if is_unknown and is_rank_zero():
        print(
            f"Warning: {source!r} has weights and no tokenizer, so it isn't known whether {place!r}"
            " is that with which they were trained: put theirs beside them."
        )
    return tokenizer


def _require_known_end(dataset: TokenDataset, tokenizer: Any, config: Any, source: str) -> None:
    """Raises ValueError where documents end with a token that ends no text of the model; warns
    where its configuration has another."""
    end, of_config = dataset.manifest.get("eos_token_id"), config.get_text_config().eos_token_id
    # A configuration holds one id, a list of them, or none.
    of_config = [of_config] if isinstance(of_config, int) else of_config or []
    of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    # The end is known, or there is nothing to compare it with.
    if end is None or end in of_config or of_tokenizer is None and not of_config:
        return
    sentence = f"Documents of {dataset.given!r} end with token {end}"
    if of_tokenizer is not None and end != of_tokenizer:
        raise ValueError(
            f"{sentence}, and texts of {source!r} with {of_tokenizer}: make the data with "
            f"{command('prepare_data.py', tokenizer=source)}."
        )
    if of_config and is_rank_zero():
        ids = ", ".join(map(str, of_config))
        print(
            f"Warning: {sentence}, but in the configuration of {source!r} {ids} ends a text: what "
            "is generated won't stop there."
        )


def require_whole(source: Path, hashes: bool) -> None:
    """Raises Fault if a new run starts from a checkpoint whose files aren't as listed. Other files
    may be beside them."""
    # A folder of Hugging Face has no manifest, and nothing to compare with.
    if (source / MANIFEST).is_file():
        listed = files.read(source)["files"]
        files.check_files(source, listed, hashes, f"{str(source)!r} is damaged", NO_CHECKPOINT)
    elif (source / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(source)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)


def require_rows_for(text_config: Any, datasets: Sequence[TokenDataset], source: str) -> None:
    """Raises ValueError if the model has no embedding for a token, or too few positions."""
    # With rotary positions a longer row is possible; warnings.py tells of it.
    longest = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    for dataset in datasets:
        # On a GPU such a token would end in an assertion that names nothing.
        if dataset.max_token_id >= text_config.vocab_size:
            words = {"tokenizer": source}
            if loading.tokenizer_beside(source) is None:
                words = {"tokenizer": "THAT_OF_ITS_WEIGHTS"}
                if not loading.has_weights(source):
                    words = {"train_tokenizer": text_config.vocab_size}
            raise ValueError(
                f"{dataset.given!r} holds token id {dataset.max_token_id}, but the "
                f"vocabulary of {source!r} has {text_config.vocab_size} tokens: the dataset was "
                f"made with another tokenizer; make it with {command('prepare_data.py', **words)}."
            )
        if longest is not None and dataset.context_length > longest and not rotary:
            rows = f"Rows of {dataset.given!r} hold {dataset.context_length} tokens"
            shorter = command("prepare_data.py", context_length=longest)
            raise ValueError(f"{rows}, but {source!r} has positions for {longest}: {shorter}.")


def require_model_can(plan: Plan, skeleton: Any) -> None:
    """Raises ValueError if the model can't do what the flags ask for. Changes `skeleton`, which
    isn't used afterwards."""
    name, checkpointing = type(skeleton).__name__, plan.model.activation_checkpointing
    whole.require_opens(skeleton)
    # Ranks would wait for each other in different layers, or take the weights of one for another's.
    dropped = max(getattr(module, "layerdrop", 0) for module in skeleton.modules())
    if dropped and plan.placement.world_size > 1:
        raise ValueError(
            f"{name} leaves out layers at random ({dropped:g} as layerdrop in the configuration of "
            f"{plan.model.source!r}), on each rank others: set that to 0, or train on one device."
        )
    # The same units as in training, so that a wrong policy is told before weights are loaded.
    units = strategies.modules_to_wrap(skeleton, plan.placement.sharding.auto_wrap_policy)
    # Raises for a module with parameters of several dtypes, which FSDP can't flatten.
    if plan.placement.strategy in ("fsdp", "fsdp2"):
        strategies.of_one_dtype(skeleton, units)
    if checkpointing != "none" and not skeleton.supports_gradient_checkpointing:
        raise ValueError(f"--activation_checkpointing {checkpointing}: {name} doesn't support it.")
    # Tried on the skeleton, so that what the model can't do is told now.
    layers.checkpoint_activations(skeleton, checkpointing)
    if plan.model.float8 != "none":
        # A feature that is off isn't imported.
        from fabric_llm.model import float8

        if (missing := float8.no_float8(plan.placement.kind)) is not None:
            raise ValueError(f"--float8 {plan.model.float8}: {missing}.")
        float8.float8_products(skeleton, plan.model.float8, is_emulated=True)
    masks = plan.data.document_end is not None and plan.data.document_masking is True
    # Positions that begin anew tell the model where a document begins.
    if masks and not takes_positions(type(skeleton)):
        raise ValueError(
            f"{name} takes no positions, so packed documents can't be kept apart: take "
            "--document_masking auto or false."
        )
    # Only a --model_name that was changed since is compared with the checkpoint.
    if plan.resume_from is None or plan.model.name in (
        plan.model.source,
        plan.resumed["model_name"],
    ):
        return
    named = loading.checked_skeleton(
        plan.model.name, loading.load_config(plan.model.name), skeleton.dtype
    )
    # Names and shapes suffice to tell another model, and need no weights.
    here, there = dict(state_dicts.saved_shapes(named)), dict(state_dicts.saved_shapes(skeleton))
    names = sorted(here.keys() | there.keys())
    if differing := [name for name in names if here.get(name) != there.get(name)]:
        words = []
        for name in differing[:MOST_NAMED]:
            stored, wanted = list(there.get(name, ())), list(here.get(name, ()))
            words.append(f"{name} {stored or 'missing'}, not {wanted or 'there'}")
        raise ValueError(
            f"{str(plan.resume_from)!r} belongs to another model than --model_name "
            f"{plan.model.name!r}: {len(differing)} parameters differ: {'; '.join(words)}."
        )


def require_shares(
    sharing: int, model: ModelPlan, attention: str, rows: str, context_length: int
) -> None:
    """Raises ValueError if a model can't share `rows`, in words, of so many tokens among `sharing`
    ranks."""
    if sharing == 1:
        return
    flag, name = f"--context_parallel {sharing}", repr(model.name)
    text_config = model.config.get_text_config()
    if attention not in ("auto", "packed"):
        raise ValueError(
            f"{flag} exchanges heads around packed attention: take --attention auto, not "
            f"{attention}."
        )
    model_class = loading.causal_lm_class(model.config)
    if not takes_documents(model_class):
        raise ValueError(
            f"{flag}: {model_class.__name__} can't, since it doesn't take packed attention."
        )
    # Ranks exchange parts of rows for parts of heads, so both must divide.
    if (heads := getattr(text_config, "num_attention_heads", sharing)) % sharing:
        raise ValueError(f"{flag}: {name} has {heads} attention heads, which don't divide by it.")
    if depending := positions.kinds(text_config) & positions.BY_LONGEST:
        raise ValueError(
            f"{flag}: the positions of {name} ({min(depending)}) depend on the longest that a "
            "rank sees."
        )
    if context_length % sharing:
        raise ValueError(f"{flag}: {rows} hold {context_length} tokens, which don't divide by it.")
