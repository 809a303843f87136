"""Tasks of lm-evaluation-harness as validation sets: a run's numbers are those of lm_eval on the
exported model."""

import json
import math
import random
import sys

import datasets
import numpy as np
import pytest
import torch
import yaml
from ranks import Job, metrics, train_ranks
from test_context_parallel import run_of
from transformers import LlamaConfig, LlamaForCausalLM

import export_hf
import prepare_data
from fabric_llm.data.columns import Rows
from fabric_llm.data.tasks import Tasks, open_tasks
from fabric_llm.prepare.tokenizer import train_byte_level_bpe
from fabric_llm.report.reading import read_run

WORDS = (
    "the river crosses an old bridge where señor Núñez sells bread and tea to people from "
    "every village near 東京"
).split()
QUESTIONS = 40


# it has dozens of dependencies, which .ci/run installs for the longer suite alone
LM_EVAL = pytest.mark.longer


def judged(documents, losses, targets=None, names=None, alone=False, right=1):
    """What Tasks say of documents: lists of (is right, characters), of the losses of their choices,
    nats."""
    rows = [(number, *choice) for number, document in enumerate(documents) for choice in document]
    number, gold, characters = map(np.array, zip(*rows))
    names = np.array(["one"] * len(rows) if names is None else [names[n] for n in number])
    said = {"task": names, "document": number, "gold": gold, "alone": np.full(len(rows), alone)}
    said |= {"characters": characters, "bytes": 2 * characters}
    sums = np.array([(loss, right, 0) for loss in losses], dtype=float)
    ids = {"input_ids": np.zeros((len(rows), 4), dtype=np.int32)}
    counts = np.array(targets or [1] * len(rows))
    return Tasks(Rows([ids]), said).answered(sums, counts)


def test_the_likeliest_choice_and_the_likeliest_a_character():
    documents = [[(False, 2), (True, 8)], [(True, 3), (False, 3), (False, 3)]]
    found = judged(documents, [2.0, 4.0, 1.0, 2.0, 3.0])
    assert (found["accuracy"], found["accuracy_norm"], found["documents"]) == (0.5, 1.0, 2)
    assert found["loss"] == 2.5 and found["bits_per_byte"] == pytest.approx(5 / math.log(2) / 22)


def test_of_equal_choices_the_first_is_taken_and_any_right_one_counts():
    first, second = [(True, 4), (False, 4)], [(False, 4), (True, 4)]
    assert judged([first, second], [1.0, 1.0, 1.0, 1.0])["accuracy"] == 0.5
    found = judged([[(False, 4), (True, 4), (True, 2)]], [3.0, 2.0, 1.0])
    assert found["accuracy"] == 1 and found["loss"] == 1.5, "of both right ones"
    found = judged([[(False, 0), (True, 4)]], [0.1, 1.0])
    assert found["accuracy_norm"] == 1, "an empty choice is never chosen"


def test_documents_that_were_cut_are_left_out():
    documents, losses = [[(True, 1), (False, 1)]] * 3, [1.0, 2.0, 5.0, 4.0, 9.0, 0.0]
    found = judged(documents, losses, [1, 1, 1, 1, 1, 0])
    assert (found["documents"], found["accuracy"], found["loss"]) == (2, 0.5, 3.0)
    none = judged(documents, losses, [1, 0, 0, 0, 0, 0])
    assert none["documents"] == 0 and math.isnan(none["loss"]) and "accuracy" not in none


def test_each_task_has_its_numbers_and_a_single_answer_is_right_if_greedy():
    documents = [[(True, 1), (False, 1)], [(False, 1), (True, 1)]]
    found = judged(documents, [1.0, 2.0, 1.0, 2.0], names=["yes", "no"])
    assert (found["accuracy_of_yes"], found["accuracy_of_no"], found["accuracy"]) == (1, 0, 0.5)
    assert judged([[(True, 5)]], [1.0], [2], alone=True, right=2)["accuracy"] == 1
    assert judged([[(True, 5)]], [1.0], [2], alone=True, right=1)["accuracy"] == 0


# ------------------------------------------------------------------------------- with lm_eval


@pytest.fixture(scope="module")
def harness():
    """lm_eval, whose dependencies warn of their own affairs."""
    pytest.importorskip("lm_eval", reason="lm_eval isn't installed: pip install -e '.[tasks]'")


def write_task(folder, name, **more):
    """A YAML task over a JSON file of questions: three or four choices, of several tokens, not all
    in ASCII."""
    generator = np.random.default_rng(sum(map(ord, name)))
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.jsonl").open("w") as file:
        for number in range(QUESTIONS):
            text = " ".join(generator.choice(WORDS, 3 + number % 9))
            choices = []
            for _ in range(3 + number % 2):
                choices.append(" ".join(generator.choice(WORDS, 1 + generator.integers(3))))
            answer = int(generator.integers(len(choices)))
            record = {"question": text, "choices": choices, "answer": answer}
            file.write(json.dumps(record) + "\n")
    config = {"task": name, "dataset_path": "json", "test_split": "train"}
    config |= {"dataset_kwargs": {"data_files": str(folder / f"{name}.jsonl")}}
    config |= {"output_type": "multiple_choice", "doc_to_text": "{{question}} "}
    config |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    config |= {"metric_list": [{"metric": metric} for metric in ("acc", "acc_norm")], **more}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def world(harness, tmp_path_factory):
    """A folder with a model and its tokenizer, a packed dataset, two tasks in `yaml`, and `tasks`
    made of them."""
    folder = tmp_path_factory.mktemp("world")
    text = " ".join(np.random.default_rng(0).choice(WORDS, 4000))
    (folder / "text.txt").write_text(text)
    tokenizer = train_byte_level_bpe([text], vocab_size=300)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    flags = ["--tokenizer", folder / "model", "--output", folder / "data", "--context_length", 32]
    flags += ["--validation_fraction", 0.2, "--document_separator", " the "]
    prepare_data.main([str(flag) for flag in ["--input", folder / "text.txt", *flags]])
    write_task(folder / "yaml", "first")
    more = {"num_fewshot": 1, "fewshot_split": "train", "target_delimiter": ": "}
    write_task(folder / "yaml", "second", **more)
    prepare(folder, folder / "yaml", "tasks")
    return folder


def prepare(world, tasks, name, *more):
    flags = ["--tasks", tasks, "--tokenizer", world / "model", "--output", world / name, *more]
    prepare_data.main([str(flag) for flag in flags])
    return world / name


def run_with_tasks(world, folder, ranks, *more):
    """The numbers of the tasks before step 1, and at the end."""
    sets = ("--eval_data", f"tasks={world / 'tasks'}", "--eval_iters", 100)
    train_ranks(ranks, *run_of(world / "model", world / "data", folder, "run", *sets, *more))
    return [one["tasks"] for one in metrics(folder / "run", "eval")]


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_with_tasks(world, folder, 1)


@LM_EVAL
def test_they_are_the_numbers_of_lm_eval_on_the_exported_model(world, alone, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder, found = alone
    export_hf.main([str(folder / "run"), "--output", str(tmp_path / "hf")])
    asked = {"model": "hf", "model_args": f"pretrained={tmp_path / 'hf'},dtype=float32"}
    asked |= {"device": "cpu", "tasks": ["first", "second"], "bootstrap_iters": 0}
    manager = TaskManager(include_path=str(world / "yaml"), include_defaults=False)
    said = lm_eval.simple_evaluate(**asked, task_manager=manager)
    nats, size, end = 0.0, 0, found[-1]
    for task in ("first", "second"):
        of_task = said["results"][task]
        assert end[f"accuracy_of_{task}"] == pytest.approx(of_task["acc,none"], abs=1e-12)
        assert end[f"accuracy_norm_of_{task}"] == pytest.approx(of_task["acc_norm,none"], abs=1e-12)
        for sample in said["samples"][task]:
            gold = int(sample["target"])
            nats -= sample["filtered_resps"][gold][0]
            size += len(sample["arguments"][gold][1].encode())
    assert end["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert end["documents"] == 2 * QUESTIONS and 0 < end["accuracy"] < 1
    assert found[0]["bits_per_byte"] > end["bits_per_byte"], "it has learned something"


@pytest.mark.longer
@LM_EVAL
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ("--strategy", "fsdp2")),
        (2, ("--strategy", "fsdp2", "--context_parallel", 2)),
        (1, ("--loss", "full", "--eval_batch_size", 7)),
    ],
)
def test_any_ranks_and_paths_measure_the_same(world, alone, tmp_path, ranks, more):
    found = run_with_tasks(world, tmp_path, ranks, *more)
    for here, there in zip(found, alone[1], strict=True):
        assert here.keys() == there.keys()
        for name, value in there.items():
            exact = name.startswith(("accuracy", "documents"))
            assert here[name] == (value if exact else pytest.approx(value, rel=1e-5)), name


@LM_EVAL
def test_a_cut_set_counts_whole_documents_of_each_task_and_a_budget_may_name_it(world, tmp_path):
    more = ("--forgetting_budget", "tasks:5", "--eval_iters", 3)
    first = run_with_tasks(world, tmp_path, 1, *more)[0]
    rows = datasets.load_from_disk(str(world / "tasks" / "validation"))[:24]
    whole = set(rows["document"][:-1]) - {rows["document"][-1]}
    assert len(whole) <= first["documents"] <= len(whole) + 1 and first["budget"] == 5
    assert {"accuracy_of_first", "accuracy_of_second"} <= first.keys()
    assert set(read_run(tmp_path / "run").numbers["tasks"]) == {"tasks: first", "tasks: second"}
    assert not open_tasks(world / "tasks", "full").unread, "a run warned of the columns it judges by"


@LM_EVAL
def test_a_task_of_single_answers_is_judged_by_whether_they_are_greedy(world, tmp_path):
    single = {"output_type": "loglikelihood", "doc_to_target": " {{choices[0]}}"}
    single |= {"doc_to_choice": None, "metric_list": [{"metric": "acc"}]}
    path = write_task(tmp_path, "single", **single)
    rows = datasets.load_from_disk(str(prepare(world, path, "single")))["validation"]
    assert len(rows) == QUESTIONS and all(rows["alone"]) and all(rows["gold"])


SHUFFLES = """
import random

def shuffled(document):
    order = random.sample(range(len(document["choices"])), len(document["choices"]))
    choices = [document["choices"][place] for place in order]
    return {**document, "choices": choices, "answer": order.index(document["answer"])}

def shuffle(documents):
    return documents.map(shuffled)
"""


@LM_EVAL
def test_choices_that_a_task_shuffles_are_in_the_order_of_lm_eval(world, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    # each with a cache of its own
    ours, theirs = (write_task(tmp_path / name, "shuffled") for name in ("ours", "theirs"))
    for path in (ours, theirs):
        path.with_name("shuffles.py").write_text(SHUFFLES)
        path.write_text(path.read_text() + "process_docs: !function shuffles.shuffle\n")
    random.seed(5)
    rows = datasets.load_from_disk(str(prepare(world, ours, "shuffled")))["validation"]
    manager = TaskManager(include_path=str(theirs.parent), include_defaults=False)
    asked = {"model": "dummy", "tasks": ["shuffled"], "task_manager": manager, "bootstrap_iters": 0}
    samples = lm_eval.simple_evaluate(**asked)["samples"]["shuffled"]
    expected = {sample["doc_id"]: int(sample["target"]) for sample in samples}
    for number in range(QUESTIONS):
        golds = [row["gold"] for row in rows if row["document"] == number]
        assert golds.index(True) == expected[number]


@LM_EVAL
def test_requests_keep_their_ends(world, tmp_path):
    path = write_task(tmp_path, "long", doc_to_text="{{question * 9}}")
    made = [prepare(world, path, f"long{n}", "--context_length", n) for n in (4096, 40)]
    whole, cut = (datasets.load_from_disk(str(folder))["validation"] for folder in made)
    assert len(whole[0]["input_ids"]) % 64 == 0 and len(cut[0]["input_ids"]) == 40
    for long, short in zip(whole, cut, strict=True):
        targets = [[token for token in row["labels"] if token != -100] for row in (long, short)]
        end = max(place for place, token in enumerate(long["labels"]) if token != -100) + 1
        assert targets[0] == targets[1]
        assert short["input_ids"][-40:][: min(end, 40)] == long["input_ids"][:end][-40:]


def refused(capsys, *flags):
    """The last line that prepare_data.py says."""
    with pytest.raises(SystemExit) as ending:
        prepare_data.main([str(flag) for flag in flags])
    said = capsys.readouterr().err
    assert ending.value.code == 2 and said.count("error: ") == 1 and "Traceback" not in said
    return said.strip().splitlines()[-1]


@pytest.fixture
def of(world, tmp_path, capsys):
    """What prepare_data.py says of tasks that it refuses."""

    def of(tasks, *flags):
        given = ("--tokenizer", world / "model", "--output", tmp_path / "out", *flags)
        said = refused(capsys, "--tasks", tasks, *given)
        assert not (tmp_path / "out").exists()
        return said

    return of


@LM_EVAL
def test_mistakes(world, of, tmp_path, capsys, monkeypatch):
    def of_task(name, **more):
        return of(write_task(tmp_path, name, **more))

    output = ("--output", tmp_path / "out")
    assert "and needs the first" in refused(capsys, "--tasks", "first", *output)
    assert "no input" in refused(capsys, "--tokenizer", world / "model", *output)
    assert "and needs" in of(", ")
    assert "not --packing" in of("first", "--packing", "best_fit")
    assert "not --input" in of("first", "--input", world / "text.txt")
    said = of("hellaswog")
    assert "no task 'hellaswog', and there is no such file. Did you mean 'hellaswag'?" in said
    generates = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    assert "'written' (generate_until) doesn't judge" in of_task("written", **generates)
    said = of_task("otherwise", metric_list=[{"metric": "f1"}])
    assert "'otherwise' (multiple_choice) doesn't judge" in said
    said = of_task("unknown", doc_to_target="-1")
    assert "'unknown' says of no answer that it is right" in said
    assert "an answer of" in of(world / "yaml" / "first.yaml", "--context_length", 4)
    (tmp_path / "broken.yaml").write_text("task: broken\ndataset_path: nowhere/at_all\n")
    assert "lm_eval can't load this" in of(tmp_path / "broken.yaml")
    of_the_second = "{{question if choices|length == 3 else question.of.nothing}}"
    said = of_task("template", doc_to_text=of_the_second)
    assert "can't build the requests of 'template', with num_fewshot 0: UndefinedError" in said
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert "pip install -e '.[tasks]'" in of("hellaswag")


@LM_EVAL
def test_a_run_refuses_tasks_as_text_and_those_of_another_tokenizer(world, tmp_path):
    job = Job(1, *run_of(world / "model", world / "tasks", tmp_path, "text"))
    assert job.wait() == [2] and "has no split 'train', only 'validation'" in job.output[0]
    other = train_byte_level_bpe([" ".join(reversed(WORDS)) * 9], vocab_size=280)
    other.save_pretrained(tmp_path / "other")
    tokenizer = ("--tokenizer", tmp_path / "other")
    tasks = prepare(world, world / "yaml" / "first.yaml", "other", *tokenizer)
    more = ("--eval_data", f"tasks={tasks}")
    job = Job(1, *run_of(world / "model", world / "data", tmp_path, "run", *more))
    assert job.wait() == [2] and "was made with a different tokenizer" in job.output[0]


def group_of(folder, name, *tasks, **more):
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"group": name, "task": list(tasks), **more}))
    return path


def counts_of(folder):
    return json.loads((folder / "tasks.json").read_text())


@LM_EVAL
def test_a_group_in_a_folder_or_alone_is_its_tasks(world, tmp_path):
    folder = tmp_path / "yaml"
    for name in ("first", "second", "third"):
        write_task(folder, name, tag=["tagged"] if name == "third" else None)
    second = {"task": "second", "num_fewshot": 2, "fewshot_split": "train"}
    group_of(folder, "a_group", "first", second)
    group_of(folder, "outer", "a_group", "tagged")
    counts = counts_of(prepare(world, folder, "grouped"))
    assert counts == {"first": QUESTIONS, "second": QUESTIONS, "third": QUESTIONS}
    rows = datasets.load_from_disk(str(world / "grouped"))["validation"]
    longest = dict.fromkeys(counts, 0)
    for row in rows:
        longest[row["task"]] = max(longest[row["task"]], sum(map(bool, row["input_ids"])))
    assert longest["second"] > 2 * longest["third"], "as the group has it, with two examples"
    alone = ",".join(str(folder / f"{name}.yaml") for name in ("a_group", "first", "second"))
    assert counts_of(prepare(world, alone, "alone")) == {"first": QUESTIONS, "second": QUESTIONS}


@LM_EVAL
def test_no_task_disappears_beside_another_of_its_name(of, tmp_path):
    folder = tmp_path / "yaml"
    write_task(folder, "first", task="mine")
    write_task(folder, "second", task="mine")
    both = f"'{folder}/first.yaml' and '{folder}/second.yaml' have the same name, 'mine'"
    assert both in of(folder)
    write_task(folder, "first", task="first")
    write_task(folder / "below", "second", task="mine")
    both = f"'{folder}/below/second.yaml' and '{folder}/second.yaml' have the same name"
    assert both in of(folder)
    write_task(tmp_path, "alone", task="hellaswag")
    said = of(f"hellaswag,{tmp_path / 'alone.yaml'}")
    assert f"has 'hellaswag' twice: by its name, and in '{tmp_path}/alone.yaml'" in said


@LM_EVAL
def test_what_is_no_task_or_group(of, tmp_path, monkeypatch):
    import lm_eval.tasks

    assert "no task, but a group without tasks" in of(group_of(tmp_path, "empty"))
    assert "no task, but a group without tasks" in of(write_task(tmp_path, "of_old", group="older"))
    (tmp_path / "shared.yaml").write_text("num_fewshot: 2\n")
    said = of(tmp_path / "shared.yaml")
    assert "shared.yaml' names no task or group; if others include it" in said
    (tmp_path / "latin.yaml").write_bytes("task: señor\n".encode("latin-1"))
    assert "latin.yaml' can't be read: " in of(tmp_path / "latin.yaml")
    path = write_task(tmp_path, "data")
    with (tmp_path / "data.jsonl").open("ab") as file:
        file.write('{"question": "señor"}'.encode("latin-1"))
    said = of(path)
    assert "data.yaml: lm_eval can't load this: " in said and "utf-8" in said.lower()
    manager = lm_eval.tasks.TaskManager  # lists only what is given: its own tasks take a while
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **_: manager(include_defaults=False))
    said = of(group_of(tmp_path, "of_nothing", "elsewhere"))
    assert "with 'elsewhere', which isn't known" in said


@LM_EVAL
@pytest.mark.parametrize("sampler", ["default", "first_n"])
def test_more_examples_than_documents(world, of, tmp_path, sampler):
    def task(examples):
        config = {"sampler": sampler, "split": "train"}
        return write_task(tmp_path, "many", num_fewshot=examples, fewshot_config=config)

    assert f"of 'many', with num_fewshot {QUESTIONS}: " in of(task(QUESTIONS))
    prepare(world, task(QUESTIONS - 1), f"many-{sampler}", "--context_length", 64)
