"""A causal language model that returns its loss: `token_loss`, which is the one that --code
registers, or cross-entropy."""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from fabric_llm.base import register
from fabric_llm.base.faults import Fault
from fabric_llm.data import batches
from fabric_llm.data.folders import IGNORED
from fabric_llm.model import chunked_loss, packed_attention

# Evaluations also sum the loss by how far into its document a target is: the number of ranges. See
# training/evaluation.py.
PLACES = 12
# Names that causal LMs have for the coefficient of their routers' loss.
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What is trained: a sum over all targets, float32 scalar. Arguments as of `cross_entropy`."""
    if "loss" in register.ONLY:
        return losses_to_log(logits, targets)[0]
    return cross_entropy(logits, targets)


def losses_to_log(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 [1 + k]: what the loss of --code trains, and the k sums that it adds to the log. Only
    the first has a gradient."""
    loss, adds = register.ONLY["loss"]
    with register.of_user("loss"):
        result = loss(logits, targets, register.LOADED["flags"])
        trained, *added = result if adds else (result,)
    # Without these checks, a mistake would only fail later, where nothing names --code.
    are_scalars = all(isinstance(one, Tensor) and one.shape == () for one in (trained, *added))
    if not are_scalars or len(added) != len(adds):
        numbers = f"a tuple of {1 + len(adds)} scalar tensors" if adds else "a scalar tensor"
        raise Fault(f"--code: the loss must return {numbers}, summed over targets.")
    if logits.requires_grad and torch.is_grad_enabled() and not trained.requires_grad:
        raise Fault("--code: the loss must return a number that has a gradient.")
    return torch.stack([trained.float(), *(one.detach().float() for one in added)])


def require_sum(vocabulary: int) -> None:
    """Raises Fault (2) where the loss of --code is a mean over targets, with which parts of a batch
    would count by other weights. vocabulary: columns of the logits. All ranks call it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, vocabulary, generator=generator)
    targets = torch.arange(8) % vocabulary
    try:
        once, twice = (
            losses_to_log(logits.repeat(times, 1), targets.repeat(times))[0] for times in (1, 2)
        )
    # It may need more than logits, such as what its own model was given. Its first step says so
    # where it can't have that.
    except Fault:
        return
    if (twice - once).abs() < (twice - 2 * once).abs():
        raise Fault(
            'the loss of --code must be a sum over targets, such as by reduction="sum": of the '
            f"same targets twice it is {twice:.4g}, and of them once {once:.4g}."
        )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets, float32 scalar, in nats. Evaluations report it,
    whatever is trained.

    logits: [tokens, vocabulary], of a batch or a part of it. targets: int64 [tokens], -100 where
    there is none.
    """
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def _by_place(
    cross_entropy: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor
) -> Tensor:
    """float32 [1 + PLACES]: the cross-entropy, and its parts by the places in the second column of
    `targets`."""
    targets, places = targets.unbind(dim=1)
    # Tokens without a target have a loss of 0 here, so their places don't matter.
    each = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    by_place = _sums_by(places, PLACES, each)
    # The total is computed as it is without places, so that they don't change its last bits.
    return torch.cat([cross_entropy(logits, targets)[None], by_place])


def by_row(rows: int, logits: Tensor, targets: Tensor) -> Tensor:
    """float32 [1 + 3 x rows]: the cross-entropy, and of each row, which the second column of
    `targets` names, three sums over its targets.

    These are the cross-entropy, how many are the likeliest token, and their margins: logit minus
    the largest one of other tokens.
    """
    is_target = targets[:, 0] != IGNORED
    # Each copy of logits below has the size of the vocabulary for each token: others go first.
    logits, (targets, numbers) = logits[is_target].float(), targets[is_target].unbind(1)
    each = F.cross_entropy(logits, targets, reduction="none")
    own = logits.gather(1, targets[:, None])
    # With the target's own logit at -inf, the largest one is that of another token.
    margin = (own - logits.scatter(1, targets[:, None], -torch.inf).amax(dim=1, keepdim=True))[:, 0]
    sums = torch.stack([each, (margin > 0).float(), margin], dim=1)
    return torch.cat([each.sum()[None], _sums_by(numbers, rows, sums).flatten()])


def _sums_by(numbers: Tensor, count: int, values: Tensor) -> Tensor:
    """[count, ...]: for each number below `count` the sum of the values that have it. numbers:
    int64 [n]. values: [n, ...]."""
    # Not by index_add_, which on a GPU adds in another order each time: a resumed run must log the
    # same bits.
    are_of = torch.arange(count, device=numbers.device)[:, None] == numbers
    return torch.where(are_of.view(*are_of.shape, *[1] * (values.ndim - 1)), values, 0).sum(dim=1)


class LanguageModel(nn.Module):
    """A causal LM that returns its loss, so that no logits leave the wrapped module (Fabric would
    copy them)."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        with_router_loss: bool = False,
        chunked: bool = False,
        adds: Sequence[str] = (),
    ) -> None:
        """with_router_loss, adds: see `forward`. chunked: without the logits of the whole batch,
        see chunked_loss.py."""
        super().__init__()
        self.causal_lm, self.with_router_loss = causal_lm, with_router_loss
        # Names of the numbers that follow the loss in the vector that `forward` returns.
        self.other_losses = [*adds, *["aux_loss"] * with_router_loss]
        self.with_added = bool(adds)
        self.head = chunked_loss.Head(causal_lm) if chunked else None
        # Modules that strategies mustn't shard by themselves, but with the outermost unit.
        self.keep_in_root: set[nn.Module] = self.head.keep_in_root if chunked else set()
        # Modules that --tiled_mlp concerns: strategies mustn't shard parts of them.
        self.tiled: set[nn.Module] = set()
        # Names of parameters that the loss may not depend on, see capabilities.idle_parameters.
        self.idle: frozenset[str] = frozenset()
        self.token_loss, self.cross_entropy = token_loss, cross_entropy
        # A cache of keys and values would only take memory. Some classes know no such argument.
        known = inspect.signature(causal_lm.forward).parameters.values()
        takes_use_cache = any(p.name == "use_cache" or p.kind == p.VAR_KEYWORD for p in known)
        self.without_cache = {"use_cache": False} if takes_use_cache else {}
        self.is_packed = causal_lm.config._attn_implementation == packed_attention.PACKED
        # Ranks that share the rows of a batch, see data/batches.part_of. None: each has whole rows.
        self.context_group: Optional[ProcessGroup] = None

    def forward(
        self,
        input_ids: Tensor,
        labels: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        document_ends: Optional[Tensor] = None,
        places: Optional[Tensor] = None,
        questions: Optional[Tensor] = None,
    ) -> Tensor:
        """The loss: `token_loss`, or `cross_entropy` where no gradient is wanted. Without `labels`,
        the logits [rows, context, vocabulary].

        In training, with `adds` or with_router_loss, the result is a vector: what is trained, what
        a loss of --code adds to the log, and the sum of the rows' auxiliary losses, each times the
        row's targets.

        input_ids, attention_mask, position_ids: int64 [rows, context].

        position_ids that restart keep documents apart: transformers reads the attention mask from
        them if no other mask is given and nothing is cached.

        labels: int64 [rows, context], unshifted: position t is predicted from the positions before
        it, and -100 is no target. Where the ranks of `context_group` have the other parts of these
        rows, labels have one column more.

        document_ends: what packed attention takes in place of a mask, see batches.document_ends.

        places: in an evaluation, int64 [rows, context], numbers below PLACES. The result is float32
        [1 + PLACES]: the loss, and the loss of the targets of each place.

        questions: in an evaluation, int64 [rows], of rows that ask something. The result is that of
        `by_row`.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        # Some classes don't take all of these arguments, even as None.
        given = {name: value for name, value in given.items() if value is not None}
        balances = self.with_router_loss and self.training and labels is not None
        if balances:
            given["output_router_logits"] = True
        # How many columns labels have beyond input_ids: 1 where ranks hold parts of rows, else 0.
        after = 0 if labels is None else labels.shape[1] - input_ids.shape[1]
        group = self.context_group if after else None
        if self.is_packed and position_ids is not None:
            # Batches of data/batches.py bring the ends along. Probes have positions alone.
            if document_ends is None:
                document_ends = batches.document_ends(position_ids.cpu())
            longest = input_ids.shape[1]
            if group is not None:
                # A document may go through the parts of all these ranks.
                longest *= group.size()
            given |= packed_attention.of_documents(document_ends, longest, group)
        inputs = {"input_ids": input_ids, **self.without_cache, **given}
        if labels is None:
            return self.causal_lm(**inputs).logits
        # Each position predicts the next label. The last one of a row has none to predict, unless
        # another rank holds the rest of the row: then `labels` has that rank's first label as well.
        targets = F.pad(labels[:, 1:], (0, 1 - after), value=IGNORED)
        loss_of, targets_of = self._loss_and_targets(targets, places, questions)
        # Without `head`, the logits of the whole batch are in memory at once.
        if self.head is None:
            outputs = self.causal_lm(**inputs)
            loss = loss_of(outputs.logits.flatten(0, 1), targets_of)
        else:
            hidden, outputs = self.head.hidden_states(**inputs)
            loss = chunked_loss.chunked_loss(self.head, loss_of, hidden.flatten(0, 1), targets_of)
        if not balances:
            return loss
        of_rows = torch.zeros(len(targets), device=targets.device)
        if outputs.router_logits:  # none where the configuration leaves no layer with experts
            top_k = self.causal_lm.num_experts_per_tok
            of_rows = load_balancing_loss(
                outputs.router_logits, len(targets), top_k, attention_mask, group
            )
        # The caller divides by the targets of the global batch, as it does with the loss itself.
        aux_loss = (of_rows * (targets != IGNORED).sum(dim=1)).sum()
        return torch.cat([loss.flatten(), aux_loss[None]])

    def _loss_and_targets(
        self, targets: Tensor, places: Optional[Tensor], questions: Optional[Tensor]
    ) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
        """(the loss that is asked for, the targets that it takes, one row for each token).

        targets: int64 [rows, context]. places, questions: see `forward`.
        """
        # Evaluations measure the cross-entropy whatever is trained, so that runs can be compared.
        loss_of = self.token_loss if torch.is_grad_enabled() else self.cross_entropy
        if self.with_added and self.training and torch.is_grad_enabled():
            loss_of = losses_to_log
        targets_of = targets.flatten()
        # By what evaluations sum the loss, a place or a row, is a second column of the targets.
        if places is not None:
            loss_of = partial(_by_place, loss_of)
            targets_of = torch.stack([targets_of, places.flatten()], dim=1)
        elif questions is not None:
            loss_of = partial(by_row, len(targets))
            numbers = torch.arange(len(targets), device=targets.device)[:, None].expand_as(targets)
            targets_of = torch.stack([targets_of, numbers.flatten()], dim=1)
        return loss_of, targets_of


def trained_loss(losses: Tensor, router_aux_loss_coef: float) -> Tensor:
    """What is trained, scalar: the first number of a vector, to which a model with
    `with_router_loss` adds the last one times its coefficient."""
    if losses.ndim == 0:
        return losses
    if not router_aux_loss_coef:
        return losses[0]
    return losses[0] + router_aux_loss_coef * losses[-1]


def router_coefficient(causal_lm: PreTrainedModel, given: Optional[float]) -> float:
    """The coefficient of the auxiliary loss of a mixture of experts in what is trained; 0 where
    there is none.

    given: --router_aux_loss_coef; None: as the model's configuration says, where that asks for the
    routers' logits. Raises ValueError for one that is given to a model without such a loss.
    """
    if given and not has_router_loss(causal_lm):
        name = type(causal_lm).__name__
        raise ValueError(
            f"--router_aux_loss_coef {given}: transformers knows no auxiliary loss of {name}."
        )
    if given is not None:
        return float(given)
    asked = getattr(causal_lm.config.get_text_config(), "output_router_logits", False)
    if asked and has_router_loss(causal_lm):
        for name in COEFFICIENTS:
            value = getattr(causal_lm, name, None)
            if value is not None:
                return float(value)
    return 0.0


def router_warning(causal_lm: PreTrainedModel) -> Optional[str]:
    """A warning where the configuration asks for a loss of the routers that transformers doesn't
    have, else None."""
    asked = getattr(causal_lm.config.get_text_config(), "output_router_logits", False)
    if not asked or has_router_loss(causal_lm):
        return None
    return (
        "Warning: the configuration says output_router_logits, but transformers knows no auxiliary "
        f"loss of {type(causal_lm).__name__}: none is trained."
    )


def has_router_loss(causal_lm: PreTrainedModel) -> bool:
    """True for models to whose loss transformers would add that of the Switch Transformer, which
    `load_balancing_loss` computes."""
    # Other models have a function of this name that computes something else, from other arguments.
    function = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
    if function is None or not isinstance(getattr(causal_lm, "num_experts_per_tok", None), int):
        return False
    return list(inspect.signature(function).parameters) == [
        "gate_logits",
        "num_experts",
        "top_k",
        "attention_mask",
    ]


def load_balancing_loss(
    router_logits: Sequence[Tensor],
    rows: int,
    top_k: int,
    attention_mask: Optional[Tensor] = None,
    group: Optional[ProcessGroup] = None,
) -> Tensor:
    """The auxiliary loss of each row, float32 [rows], which is small where the row's tokens are
    spread evenly over the experts.

    transformers adds it only where it computes the cross-entropy itself, and for all tokens of a
    forward pass together. It is a product of means over tokens, so its average over micro-batches
    isn't that of the whole batch. The loss of each row, weighted by the row's targets as the
    cross-entropy is, is the same however rows are spread over micro-batches and ranks.

    router_logits: of each layer with experts, [rows x context, experts]. attention_mask: [rows,
    context], 0 for padding. group: the ranks that have the other parts of the rows. Fedus et al.
    (2021), Switch Transformers (https://arxiv.org/abs/2101.03961), equations 4 to 6, over all
    layers together: experts x the sum over experts of (fraction of the tokens that it is chosen
    for) x (mean of its probability). 1 x top_k where all is even. Only the probabilities have a
    gradient.
    """
    experts = router_logits[0].shape[-1]
    chosen = torch.zeros(rows, experts, device=router_logits[0].device)
    probable = torch.zeros_like(chosen)
    # Layers may return [tokens, experts] without the dimension of rows.
    context = router_logits[0].numel() // (rows * experts)
    # Padding goes to experts as well, but isn't to be spread evenly.
    if attention_mask is None:
        is_token = torch.ones(rows, context, device=chosen.device)
    else:
        is_token = attention_mask.float()
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1).view(rows, context, experts)
        # 1 where a token chooses an expert. It has no gradient.
        places = torch.zeros_like(probabilities).scatter_(
            -1, probabilities.topk(top_k, dim=-1).indices, 1.0
        )
        chosen = chosen + (places * is_token[..., None]).sum(dim=1)
        probable = probable + (probabilities * is_token[..., None]).sum(dim=1)
    # Each layer has counted each token once.
    tokens = len(router_logits) * is_token.sum(dim=1, keepdim=True)
    if group is not None:
        # The means are of whole rows, and each rank has counted its part of them. A feature that is
        # off isn't imported.
        from fabric_llm.model.context_parallel import Summed

        chosen = Summed.apply(chosen, group)
        probable = Summed.apply(probable, group)
        tokens = Summed.apply(tokens, group)
    # A row of padding alone has no tokens to divide by.
    tokens = tokens.clamp(min=1)
    return experts * (chosen / tokens * (probable / tokens)).sum(dim=1)
