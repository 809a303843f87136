"""A small model that was trained on rows of 256 tokens goes on with rows of 2,048, with and without
--rope, on one and two ranks."""

import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page
from fabric_llm.base import files

SHORT, LONG, VOCABULARY = 256, 2048, 2048
SHAPE = inputs.llama(128, 352, 4, 4, 2, vocab_size=VOCABULARY, max_position_embeddings=SHORT)
ROPE = "--rope theta:80000"  # eight times as long, eight times the base
RUNS = {  # name -> flags of the run that goes on
    "positions as they were": "",
    f"`{ROPE}`": ROPE,
    f"`{ROPE} --context_parallel 2`": f"{ROPE} --devices 2 --context_parallel 2",
    "`--rope yarn:8`": "--rope yarn:8",
}
TEXT = "--exclude site-packages test idlelib --pattern *.py"
COMMON = "--precision bf16-true --lr_schedule wsd --eval_iters 8 --eval_batch_size 4 "
COMMON += "--log_step_interval 20 --accelerator cpu"
BASE = "--max_step 1200 --lr 2e-3 --warmup_steps 120 --global_batch_size 16 --micro_batch_size 16"
MORE = "--max_step 100 --lr 1e-3 --global_batch_size 4 --micro_batch_size 2"
MORE += " --probes copy,retrieval"


def main() -> None:
    parser = page.parser(__doc__)
    help = "of data and runs; what is done stays as it is"
    parser.add_argument("--folder", type=Path, required=True, help=help)
    options = page.parse(parser)
    began, folder = time.monotonic(), options.folder.resolve()
    short, long, library = folder / "short", folder / "long", sysconfig.get_path("stdlib")
    words = f"--context_length {SHORT} --train_tokenizer {VOCABULARY}"
    inputs.once("prepare_data.py", TEXT, words, output=short, input=library)
    words = f"--context_length {LONG} --min_document_tokens {LONG} --validation_fraction 0.05"
    given = {"input": library, "tokenizer": short / "tokenizer"}
    inputs.once("prepare_data.py", TEXT, words, output=long, **given)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    inputs.write_llama(folder / "model", **SHAPE, rope_parameters=rope)
    base = {"model_name": folder / "model", "train_data_dir": short}
    inputs.train(folder / "base", COMMON, BASE, **base)
    goes_on = {"model_name": files.latest(folder / "base"), "train_data_dir": long}
    rows = []
    for number, (name, flags) in enumerate(RUNS.items()):
        run = folder / f"more-{number}"
        inputs.train(run, COMMON, MORE, flags, **goes_on)
        first, *_, last = inputs.log(run, "eval")
        rows.append({"name": name, "when": "before", **first["eval"]})
        rows.append({"name": name, "when": "after", **last["eval"]})
    notes = [
        f"A Llama of {SHAPE}, trained on rows of {SHORT} tokens with {COMMON} {BASE}, and on rows "
        f"of {LONG:,} with {MORE}",
        f"All of it took {(time.monotonic() - began) / 60:.0f} minutes",
    ]
    page.write(f"From {SHORT} tokens to {LONG:,}", notes, options, [body(rows)], rows)


def body(rows: list[page.Row]) -> str:
    keys = [key for key in rows[-1]["validation"] if key.startswith("loss_from_")]
    places = [f"from {int(key.rpartition('_')[2]):,}" for key in keys]
    lines = []
    for row in rows:
        losses = [row["validation"][key] for key in ("loss", *keys)]
        losses += [row["copy"]["loss"], row["retrieval"]["loss"]]
        answers = f"{row['retrieval']['accuracy']:.0%}"
        lines.append([row["name"], row["when"], *(f"{loss:.3f}" for loss in losses), answers])
    return page.table(["", "", "all", *places, "copy", "retrieval", "found"], lines, words=2)


if __name__ == "__main__":
    main()
