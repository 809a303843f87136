"""The auxiliary loss of mixture-of-experts models: what it is, when it is trained. Over
micro-batches and ranks: law 1."""

import sys

import pytest
import torch
import transformers
from conftest import ended
from families import COMMON
from ranks import metrics, toy_run, train_ranks

import train
from fabric_llm.model import language_model
from fabric_llm.model.language_model import LanguageModel, load_balancing_loss
from fabric_llm.model.layers import checkpoint_activations

SMALL = {**COMMON, "intermediate_size": 24, "vocab_size": 64, "pad_token_id": 0}
SMALL |= {"num_experts_per_tok": 2, "initializer_range": 0.3}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}
FAMILIES = {
    "Mixtral": {},
    "Qwen2Moe": {},
    "Qwen3Moe": {},
    "Olmoe": {},
    "GptOss": {"head_dim": 8},
    "Jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "GraniteMoe": {},
    "Phimoe": {},
}


def family(name, **changes):
    given = {**SMALL, **EXPERTS, **FAMILIES[name], **changes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**given)
    return transformers.AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_row_alone_it_is_that_of_transformers(name):
    model = family(name)
    assert language_model.has_router_loss(model)
    assert language_model.router_coefficient(model, None) == 0.0
    input_ids = torch.randint(1, 64, (3, 10))
    mask = torch.ones_like(input_ids)
    mask[1, 6:] = 0
    for attention_mask in (None, mask):
        given = {"output_router_logits": True, "use_cache": False}
        out = model(input_ids, attention_mask=attention_mask, **given)
        experts = model.num_experts_per_tok
        found = load_balancing_loss(out.router_logits, 3, experts, attention_mask)
        for row in range(3):
            theirs = router_loss_of_transformers(model, out.router_logits, row, attention_mask)
            torch.testing.assert_close(found[row], theirs, rtol=1e-5, atol=0)
    whole = model(input_ids[:1], **given).aux_loss
    found = load_balancing_loss(out.router_logits, 3, 2)[0]
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=0)


def router_loss_of_transformers(model, router_logits, row, attention_mask):
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    logits = tuple(layer.view(3, 10, -1)[row] for layer in router_logits)
    mask = None if attention_mask is None else attention_mask[row : row + 1]
    return function(logits, model.num_experts, model.num_experts_per_tok, mask)


def test_what_is_recomputed_is_not_counted_twice():
    grads = []
    for recompute in (False, True):
        model = LanguageModel(family("Mixtral"), with_router_loss=True)
        if recompute:
            checkpoint_activations(model.causal_lm, "full")
        torch.manual_seed(1)
        input_ids = torch.randint(1, 64, (2, 10))
        losses = model(input_ids, labels=input_ids)
        (losses[0] + 3 * losses[1]).backward()
        grads.append([losses.detach(), *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-6, atol=1e-7)

KEYS = ("loss", "aux_loss", "grad_norm", "eval_loss")


def steps(toys, folder, *more, model="mixtral"):
    words = "--run_name run --precision 32-true --global_batch_size 4 --max_step 2 --lr 1e-2 "
    words = [*words.split(), "--eval_iters", 2, *more]
    train_ranks(1, *toy_run(toys, folder, model=model), *words)
    return tuple(metrics(folder / "run", key) for key in KEYS)


@pytest.mark.longer
def test_it_is_trained_as_the_configuration_or_the_flag_says_and_logged_by_itself(toys, tmp_path):
    loss, aux, norm, evaluated = steps(toys, tmp_path / "config")
    without = steps(toys, tmp_path / "off", "--router_aux_loss_coef", 0)
    # 2 where all is even
    assert without[1] == [] and len(aux) == 2 and all(1.5 < value < 8 for value in aux)
    # The reported loss is the cross-entropy alone.
    assert loss[0] == without[0][0] and evaluated[0] == without[3][0]
    assert norm[0] != without[2][0] and loss[1] != without[0][1]
    same = steps(toys, tmp_path / "given", "--router_aux_loss_coef", 0.3)
    assert same == (loss, aux, norm, evaluated)
    much = steps(toys, tmp_path / "much", "--router_aux_loss_coef", 50, "--grad_clip", 0)
    assert much[0][0] == loss[0] and much[2][0] > 2 * norm[0]


def test_it_is_on_where_only_the_flag_says_so(toys, tmp_path):
    model = tmp_path / "model"
    config = transformers.AutoConfig.from_pretrained(toys / "mixtral", output_router_logits=False)
    config.save_pretrained(model)
    assert steps(toys, tmp_path / "off", model=model)[1] == []
    on = steps(toys, tmp_path / "on", "--router_aux_loss_coef", 0.1, model=model)
    assert len(on[1]) == 2


def test_a_model_without_experts_takes_no_coefficient(toys, tmp_path, capsys):
    flags = [*toy_run(toys, tmp_path), "--run_name", "run", "--router_aux_loss_coef", 0.1]
    assert ended(train.main, *flags) == 2
    said = capsys.readouterr().err
    assert "0.1: transformers knows no auxiliary loss of LlamaForCausalLM" in said


def test_what_is_asked_of_a_model_that_cannot_give_it_is_said():
    more = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "output_router_logits": True}
    config = transformers.DeepseekV3Config(**SMALL, **more)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert language_model.router_coefficient(model, None) == 0.0
    assert "DeepseekV3ForCausalLM: none is trained" in language_model.router_warning(model)
    mixtral = family("Mixtral", output_router_logits=True)
    assert language_model.router_warning(mixtral) is None
    assert language_model.router_coefficient(mixtral, None) == 0.001
