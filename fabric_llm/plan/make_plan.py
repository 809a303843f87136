"""Flags -> Plan: what they mean on this machine, with this dataset and model. Mistakes that need
these are found here.

Each check raises ValueError in one sentence with the offending value. A check whose result is the
same on all ranks is made on rank 0 only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags, is_first_of_machine, is_rank_zero
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.names import MOST_NAMED, command
from fabric_llm.checkpoint import keep, state_dicts, whole
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.data import mixture_text
from fabric_llm.data.columns import ENDLESS, is_padded, is_stream
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.data.folders import TASKS
from fabric_llm.data.mixture import Mixture, mixture_of
from fabric_llm.data.mixture_text import DataMix
from fabric_llm.data.sources import COPY, PROBES, open_source, parse_eval_data, parse_probes
from fabric_llm.data.tasks import open_tasks
from fabric_llm.mirror.address import is_address
from fabric_llm.model import freezing, language_model, layers, loading, positions
from fabric_llm.model import strategy as strategies
from fabric_llm.model.strategy_rules import Placement
from fabric_llm.plan import checks, fetched, same_run
from fabric_llm.plan.plan import DataPlan, ModelPlan, Plan
from fabric_llm.plan.schedule import Cursor, Schedule, last_step, lay_out
from fabric_llm.plan.start import batch_sizes
from fabric_llm.training.forgetting import hard_budgets, parse_bounds, parse_budgets

# A text of which tokenizers with other rules make other tokens.
SAMPLE = "The Quick  brown fox's 12,345\n\tÉtés: naïve 你好"


def make_plan(
    flags: Flags,
    placement: Placement,
    directory: Path,
    resume_from: Optional[Path],
    resumed: Optional[dict[str, Any]] = None,
    place: Optional[Path] = None,
) -> Plan:
    """The plan of a run in `directory`, new or resumed from the checkpoint `resume_from`. Raises
    ValueError.

    resumed: progress.json of that checkpoint, as rank 0 has read it; None: as this rank reads it.
    place: where this rank reads the checkpoint, None: where it is.
    """
    place = place or resume_from
    # Each rank checks that it sees the checkpoint, also where rank 0's document counts. A copy
    # elsewhere was checked as it was made, and has no weights.
    read = {}
    if place is not None:
        read = keep.verified(place) if place == resume_from else keep.read_progress(place)
    resumed = read if resumed is None else resumed
    # Before the data is opened, since it needs nothing but flags.
    batches = batch_sizes(flags, placement.devices, placement.num_nodes)
    with same_run.written_by_a_run(resume_from):
        data, mix = _plan_data(flags, resumed)
        schedule = _plan_schedule(flags, batches, data.sources, mix, resumed)
    # A resumed run opens what its checkpoint holds, not what --model_name may hold by now.
    source = flags.model.model_name if place is None else str(place)
    # Rank 0 alone: hashing weights takes long, and all ranks would read the same files.
    if resume_from is None and is_rank_zero():
        _require_whole(Path(source), flags.checkpoint.verify_checkpoints == "full")
    model, skeleton = _plan_model(flags, source, data, placement.kind)
    plan = Plan(placement, model, data, schedule, directory, resume_from, resumed)
    # These compare parts of the plan with each other, with the same result on all ranks.
    if is_rank_zero():
        _require_model_can(plan, skeleton)
        _require_rows_to_share(plan, flags.model.attention)
        # Checked again, now that the data has said how long the run is.
        checks.check_length(flags, schedule.max_step)
        if resume_from is not None:
            with same_run.written_by_a_run(resume_from):
                plan = replace(plan, changes=same_run.require_same_run(plan, flags))
    return plan


def _plan_model(flags: Flags, source: str, data: DataPlan, kind: str) -> tuple[ModelPlan, Any]:
    """(the plan of the model, the model on the meta device). kind: "cpu" or "cuda". Raises
    ValueError."""
    asked, training = flags.model, flags.training
    config = loading.load_config(source)
    datasets, rope = data.opened, ""
    # The configuration of a resumed run's checkpoint has them already.
    if asked.rope is not None and source == asked.model_name:
        config, rope = positions.scaled(
            config, asked.rope, max(dataset.context_length for dataset in datasets)
        )
    config._attn_implementation = loading.resolve_attention(config, asked.attention, kind)
    if is_rank_zero():
        _require_rows_for(config.get_text_config(), datasets, source)
    skeleton = loading.checked_skeleton(source, config, loading.DTYPES[asked.precision])
    tokenizer = _tokenizer_of(datasets, loading.tokenizer_beside(source), config, source)
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


def _tokenizer_of(
    datasets: Sequence[TokenDataset], of_model: Optional[Any], config: Any, source: str
) -> Optional[Any]:
    """The model's tokenizer, or else that of the first dataset that has one. Raises ValueError for
    a dataset of another."""
    tokenizer = of_model
    for dataset in datasets:
        of_data = loading.tokenizer_beside(dataset.folder / "tokenizer")
        # Where one of them has no tokenizer, there is nothing to compare.
        if None not in (of_model, of_data) and (differing := differing_tokens(of_model, of_data)):
            raise ValueError(
                f"{dataset.given!r} was made with a different tokenizer from that of "
                f"{source!r}{differing}; "
                f"make it with {command('prepare_data.py', tokenizer=source)}."
            )
        _require_known_end(dataset, of_model, config, source)
        tokenizer = tokenizer or of_data
    return tokenizer


def require_data(flags: Flags, batches: tuple[int, int, int], source: str) -> None:
    """Raises ValueError where a new run couldn't read its datasets, or its model not their tokens.

    batches: see `batch_sizes`. source: how sentences name the model.
    """
    data, mix = _plan_data(flags, {})
    _plan_schedule(flags, batches, data.sources, mix, {})
    model_name = flags.model.model_name
    config = loading.load_config(model_name)
    _require_rows_for(config.get_text_config(), data.opened, source)
    _tokenizer_of(data.opened, loading.tokenizer_beside(model_name), config, source)


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


def _require_whole(source: Path, hashes: bool) -> None:
    """Raises Fault if a new run starts from a checkpoint whose files aren't as listed. Other files
    may be beside them."""
    # A folder of Hugging Face has no manifest, and nothing to compare with.
    if (source / MANIFEST).is_file():
        listed = files.read(source)["files"]
        files.check_files(source, listed, hashes, f"{str(source)!r} is damaged", NO_CHECKPOINT)
    elif (source / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(source)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)


def _require_rows_for(text_config: Any, datasets: Sequence[TokenDataset], source: str) -> None:
    """Raises ValueError if the model has no embedding for a token, or too few positions."""
    # With rotary positions a longer row is possible; warnings.py tells of it.
    longest = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    for dataset in datasets:
        # On a GPU such a token would end in an assertion that names nothing.
        if dataset.max_token_id >= text_config.vocab_size:
            words = {"tokenizer": source}
            if loading.tokenizer_beside(source) is None:
                words = {"train_tokenizer": text_config.vocab_size}
            raise ValueError(
                f"{dataset.given!r} holds token id {dataset.max_token_id}, but the "
                f"vocabulary of {source!r} has {text_config.vocab_size} tokens: the dataset was "
                f"made with another tokenizer; make it with {command('prepare_data.py', **words)}."
            )
        if longest is not None and dataset.context_length > longest and not rotary:
            rows = f"Rows of {dataset.given!r} hold {dataset.context_length} tokens"
            raise ValueError(f"{rows}, but {source!r} has positions for {longest}.")


def _require_model_can(plan: Plan, skeleton: Any) -> None:
    """Raises ValueError if the model can't do what the flags ask for. Changes `skeleton`, which
    isn't used afterwards."""
    name, checkpointing = type(skeleton).__name__, plan.model.activation_checkpointing
    whole.require_opens(skeleton)
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
    if masks and not loading.takes_positions(type(skeleton)):
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


def _require_rows_to_share(plan: Plan, attention: str) -> None:
    """Raises ValueError if --context_parallel ranks can't have equal parts of each row, or of the
    heads."""
    sharing = plan.placement.context_parallel
    for dataset in plan.data.opened:
        folder = repr(dataset.given)
        require_shares(sharing, plan.model, attention, f"rows of {folder}", dataset.context_length)
        if sharing > 1 and "attention_mask" in dataset.train[0]:
            raise ValueError(
                f"--context_parallel {sharing}: {folder} has an attention_mask, which packed "
                "attention doesn't read."
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
    if not loading.takes_documents(model_class):
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


def _plan_data(flags: Flags, resumed: dict[str, Any]) -> tuple[DataPlan, DataMix]:
    """(the data of a run, the shares in which it is read). Raises ValueError.

    resumed: progress.json of the checkpoint, {} for a new run.
    """
    evaluation, masking = flags.evaluation, flags.data.document_masking
    # It was measured in the run's first process; another answer would change the loss.
    if masking == "auto" and resumed and "document_masking" not in checks.overrides(flags):
        masking = resumed["schedule"]["document_masking"]  # as in the steps before
    mix = mixture_text.mix_of(flags.data.data_mix, flags.data.train_data_dir)
    if flags.data.data_mix and "mixture" in resumed:
        names = mixture_of(resumed).names
        # A stage so far has weights by the place of a source, so none may be missing.
        for name in names:
            if name not in mix.names:
                raise ValueError(
                    f"--data_mix leaves out source {name!r} of the resumed run: give it weight 0."
                )
        # The flags may name the sources in another order than before. Those of the resumed run
        # come first, so that their rows keep their numbers.
        mix = mix.in_order(names)
    sources, budgets = open_sources(flags, mix), parse_budgets(evaluation.forgetting_budget)
    # require_alike() has compared the others with it.
    first = next(iter(sources.values()))
    data = DataPlan(
        sources,
        eval_data=open_eval_data(flags),
        evaluated_rows=evaluation.eval_iters * evaluation.eval_batch_size,
        budgets=budgets,
        probes=evaluated_probes(evaluation.probes, budgets),
        # "auto" counts as true until it is measured whether the model can, see Plan.completed.
        document_end=first.document_end if masking else None,
        document_masking=masking,
    )
    return data, mix


def _plan_schedule(
    flags: Flags,
    batches: tuple[int, int, int],
    sources: Mapping[str, TokenDataset],
    mix: DataMix,
    resumed: dict[str, Any],
) -> Schedule:
    """The steps of a run. Raises ValueError. batches: see `batch_sizes`."""
    training, is_named, batch = flags.training, bool(flags.data.data_mix), batches[2]
    # Of each source, in the order of the mixture.
    rows = tuple(len(source.train) for source in sources.values())
    contexts = tuple(source.context_length for source in sources.values())
    # Without --data_mix there is one source.
    if not is_named and batch > rows[0]:
        [dataset] = sources.values()
        raise ValueError(
            f"A step takes {batch} sequences, but the training split of {dataset.given!r} "
            f"has {rows[0]}."
        )
    # A stream isn't mixed, so it is the first and only source.
    if training.max_step is None and rows[0] == ENDLESS:
        [dataset] = sources.values()
        raise ValueError(f"{dataset.given!r} is a stream, which has no end: give --max_step.")
    mixture_text.require_one_length(mix, contexts)
    # A new run starts at step 0.
    start = Progress(**resumed["progress"]) if resumed else Progress()
    length = training.max_step, training.number_epochs
    # None also for a run without --data_mix: then the one source is laid out anew.
    before = resumed.get("mixture") if is_named else None
    steers = flags.evaluation.forgetting_action == "steer"
    if before is None:
        raised = _shares_of_hard_budgets(flags, mix)
        begun = mixture_text.at_least(mix, raised, contexts, exactly=True)
        stages, end, _ = lay_out(begun, rows, batch, *length)
    else:
        # Fractions are stored as text, because a float would round them.
        raised = {name: Fraction(share) for name, share in before.get("raised", {}).items()}
        stages, end = mixture_of(resumed).stages, before["end"]
        if not _is_laid_out_as_before(flags, mix, batch, resumed["schedule"]):
            # Changed on purpose: the stages before this step stay.
            here = Cursor(start.step, start.position, stages)
            more = mixture_text.at_least(mix, raised, contexts, exactly=steers)
            stages, end, _ = lay_out(more, rows, batch, *length, here)
    # Rewinds have skipped data, so the steps that are left are counted from here.
    last = [] if end is None else [last_step(start.step, start.position, end, batch)]
    if training.max_step is not None:
        last.append(training.max_step)
    mixture = Mixture(mix.names, rows, contexts, stages, training.seed, is_named)
    # The run ends at the data's end or after --max_step, whichever comes first.
    return Schedule(start, *batches, *length, mix, mixture, min(last), end, raised, steers)


def _shares_of_hard_budgets(flags: Flags, mix: DataMix) -> dict[str, Fraction]:
    """The shares of all steered sources with which a run begins, if it has a budget that holds at
    every evaluation: those that answer for it have the largest that steering may reach, from which
    it lowers them. {} without such a budget."""
    given = flags.evaluation.forgetting_budget
    hard = hard_budgets(given)
    if not hard:
        return {}
    weights = mix.stages[0].weights
    first = {name: Fraction(weight, sum(weights)) for name, weight in zip(mix.names, weights)}
    shares = {name: first[name] for name in parse_budgets(given) if name in mix.names}
    # All of them answer for a set that is no source.
    answer = [name for name in shares if name in hard or not hard <= shares.keys()]
    of_others = sum(share for name, share in shares.items() if name not in answer)
    room = parse_bounds(flags.evaluation.steer_bounds)[1] - of_others
    for name in answer:
        shares[name] = max(shares[name], room / len(answer))
    return shares


def _is_laid_out_as_before(flags: Flags, mix: DataMix, batch: int, then: Mapping[str, Any]) -> bool:
    """Whether the flags ask for the stages that a resumed run had. then: its flags."""
    training = flags.training
    if (mixture_text.described(mix), batch) != (then.get("data_mix"), then["global_batch_size"]):
        return False
    # Stages begin at fractions of a run, so another length moves them.
    if training.max_step is not None:
        return training.max_step == then["max_step"]
    return then["max_step"] is None and training.number_epochs == then["number_epochs"]


def evaluated_probes(given: Optional[str], budgets: Iterable[str]) -> list[str]:
    """Those of --probes, those that have a budget, and with any budget copy."""
    asked = {*parse_probes(given), *budgets, *[COPY] * bool(budgets)}
    return [name for name in PROBES if name in asked]


def open_here(folder: str, flags: Flags, is_text: bool = True) -> TokenDataset:
    """The dataset in `folder`, or at that address. Raises ValueError. Only one rank of each machine
    compares hashes."""
    # The others still compare sizes, which takes no time.
    verify = flags.data.verify_data if is_first_of_machine() else "size"
    there = fetched.folder(folder)
    dataset = open_source(there, verify, flags) if is_text else open_tasks(there, verify)
    return replace(dataset, address=folder) if is_address(folder) else dataset


def open_eval_data(flags: Flags) -> dict[str, TokenDataset]:
    """The datasets of --eval_data by name. Raises ValueError."""
    folders = parse_eval_data(flags.evaluation.eval_data)
    datasets = {}
    for name, folder in folders.items():
        is_text = not (fetched.folder(folder) / TASKS).is_file()
        datasets[name] = open_here(folder, flags, is_text)
    return datasets


def open_sources(flags: Flags, mix: DataMix) -> dict[str, TokenDataset]:
    """{source: its dataset}. Rank 0 checks that they can be mixed. Raises ValueError."""
    sources = {source.name: open_here(source.path, flags) for source in mix.sources}
    asked = flags.data.context_length
    for source in sources.values():
        length = source.context_length
        if asked not in (None, length):
            raise ValueError(
                f"--context_length {asked}: the rows of {source.given!r} hold {length} tokens; "
                f"run prepare_data.py again with --context_length {asked}."
            )
        if is_stream(source.train) and flags.data.data_mix:
            raise ValueError(
                f"{mix.flag}: {source.given!r} is a stream, which isn't mixed: give it by "
                "--train_data_dir."
            )
    # Each is compared with the first, which makes all alike.
    first, *others = sources.values()
    if is_rank_zero():
        for other in others:
            require_alike(first, other, mix.flag, flags.data.document_masking is not False)
    return sources


def require_alike(
    first: TokenDataset, other: TokenDataset, flag: str, masks_documents: bool
) -> None:
    """Raises ValueError unless one run can read rows of both, which `flag` names."""
    both = f"{flag}: {first.given!r} and {other.given!r}"
    columns, others = _columns(first), _columns(other)
    if columns != others:
        words = f"{', '.join(columns)}, and {', '.join(others)}"
        raise ValueError(
            f"{both} have different columns: {words}; run prepare_data.py for both with the same "
            "flags."
        )
    _require_one_tokenizer(first, other, both)
    # One token id marks ends for the whole run, so it must be the same in all sources.
    ends = [one.document_end for one in (first, other)]
    if masks_documents and ends[0] != ends[1]:
        packed = []
        for end in ends:
            words = f"packed, token {end} ends a document"
            if end is None:
                words = "not packed by prepare_data.py"
            packed.append(words)
        raise ValueError(
            f"{both} have different documents: {', and '.join(packed)}; take --document_masking "
            "false."
        )


def _columns(dataset: TokenDataset) -> list[str]:
    """The columns of its rows, without labels where these only mark padding."""
    columns = set(dataset.train[0])
    if is_padded(dataset.train):
        columns.discard("labels")
    return sorted(columns)


def _require_one_tokenizer(first: TokenDataset, other: TokenDataset, both: str) -> None:
    # Equal hashes tell that the tokenizers are equal without loading them.
    hashes = [one.manifest.get("tokenizer_sha256") for one in (first, other)]
    if hashes[0] == hashes[1] is not None:
        return
    one, another = (
        loading.tokenizer_beside(source.folder / "tokenizer") for source in (first, other)
    )
    # Where a hash is missing, the tokens themselves decide.
    words = ""
    if one is not None and another is not None:
        words = differing_tokens(one, another)
    if words or None not in hashes:
        raise ValueError(
            f"{both} were made with different tokenizers{words}; run prepare_data.py for both "
            "with one --tokenizer."
        )


def differing_tokens(one: Any, other: Any) -> str:
    """The first tokens whose ids differ between two tokenizers, or that they make of a text, as a
    part of a sentence; "" if all agree."""
    # Vocabularies first: they say best what differs.
    ids, others = one.get_vocab(), other.get_vocab()
    tokens = ids.keys() | others.keys()
    differing = sorted(token for token in tokens if ids.get(token) != others.get(token))
    words = ", ".join(
        f"{token!r} is {others.get(token, 'none')}, not {ids.get(token, 'none')}"
        for token in differing[:MOST_NAMED]
    )
    if differing:
        return f": {len(differing)} tokens differ: {words}"
    # Other merges, normalizers or templates, such as with and without BOS.
    made, made_there = (tokenizer(SAMPLE)["input_ids"] for tokenizer in (one, other))
    if made == made_there:
        return ""
    return f": {SAMPLE!r} is {made_there[:8]} ..., not {made[:8]} ..."


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
