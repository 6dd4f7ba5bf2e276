"""Batch, learning rate, warmup and token budget to start from, proposed from the size of a model.

    tokens         20 a parameter (Hoffmann et al. 2022, 2203.15556): the least loss for the FLOPs of training. A model
                   that is served much is trained longer and made smaller (Sardana et al. 2023, 2401.00448)
    batch          a power law in parameters and tokens through published runs; beside it the law of DeepSeek LLM
                   (2401.02954, section 3.1), B = 0.2920 C^0.3271 tokens for C FLOPs of training, and the critical batch
                   of Kaplan et al. 2020 (2001.08361, section 5.1), 2e8 / L^4.76 tokens at the loss L that their L(N, D)
                   expects, beyond which twice the batch saves few steps (McCandlish et al. 2018, 1812.06162)
    learning rate  a power law in parameters through the same runs; beside it 0.3118 C^-0.1250 (2401.02954)
    warmup         2 % of the steps, at most 2,000 and at least 2 / (1 - beta2) (Ma and Yarats 2019, 1910.04209)

These are where other people's runs began, not optima of this one: runs of the same size differ by factors, and what the
best rate is depends on the schedule, the batch, the data and the length. Experts: the laws are of dense models, and are
asked with the parameters that a token uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelworks.config import ModelConfig, UserError, count_parameters, format_count, scale_factor
from modelworks.plan.optimizer_bytes import check_optimizer_name
from modelworks.plan.published_runs import PowerLaw, power_law, published_runs

TOKENS_A_PARAMETER = 20.0
LONGEST_WARMUP, WARMUP_SHARE, BETA2 = 2000, 0.02, 0.95
OF_SIZE = 1e9  # parameters of a model that was trained to be used rather than to be studied
FEWEST_STEPS = 1000  # a batch so large that fewer remain leaves the schedule no room
CAUTION = "starting points, not optima: try rates 3x above and below with short runs before the long one"
NEVER_PUBLISHED = "no published run of a decoder with it is known here: find one with short runs, 10x apart at first"


@dataclass(frozen=True)
class Suggestion:
    """One proposed value. value: None where nothing is known. range: between which most published runs lie."""

    name: str
    value: float | None
    unit: str
    reason: str
    source: str
    range: tuple[float, float] | None


@dataclass(frozen=True)
class Hyper:
    """suggestions: tokens, batch, learning_rate, warmup, weight_decay. overrides: the same under the config's keys."""

    suggestions: list[Suggestion]
    overrides: dict[str, str | int | float]
    caution: str = CAUTION

    def __getitem__(self, name: str) -> Suggestion:
        return next(each for each in self.suggestions if each.name == name)


def propose(
    model: ModelConfig, *, optimizer: str = "adamw", tokens: int | None = None, seq_len: int | None = None
) -> Hyper:
    """Proposals with their reasons, sources and ranges.

    tokens: the budget, where it is given already. seq_len: makes the batch a whole number of rows.
    Raises UserError for an unknown optimiser (naming the nearest) and for no tokens.
    """
    check_optimizer_name(optimizer)
    for name, given in (("tokens", tokens), ("seq_len", seq_len)):
        if given is not None and given < 1:
            raise UserError(f"{name}: got {given}, expected at least 1")
    parameters = count_parameters(model).active
    budget = _tokens(parameters, tokens, sparse=model.n_experts > 0)
    assert budget.value is not None
    batch, rows = _batch(parameters, budget.value, seq_len)
    assert batch.value is not None
    steps = max(1, math.ceil(budget.value / batch.value))
    rate, decay = _rate(parameters, budget.value, batch.value, optimizer), _decay(optimizer)
    warmup = _warmup(steps, batch.value)
    overrides: dict[str, str | int | float] = {"train.duration": f"{int(budget.value)} tokens"}
    if rows is not None:
        overrides["train.global_batch"] = rows
    for key, suggestion in (("optimizer.lr", rate), ("optimizer.weight_decay", decay)):
        if suggestion.value is not None:
            overrides[key] = suggestion.value
    overrides["schedule.warmup"] = f"{int(warmup.value or 0)} steps"
    return Hyper([budget, batch, rate, warmup, decay], overrides)


def deepseek_batch(flops: float) -> float:
    """Tokens. 2401.02954, equation 1; drawn through runs of 1e17 to 2e19 FLOPs, and used for 3e23."""
    return float(0.2920 * flops**0.3271)


def deepseek_rate(flops: float) -> float:
    """Of AdamW, for the batch of `deepseek_batch`."""
    return float(0.3118 * flops**-0.1250)


def critical_batch(parameters: float, tokens: float) -> float:
    """Tokens, by Kaplan et al. 2020: equation 5.3 at the loss of equation 1.5. Drawn from models of up to 1.5B."""
    loss = ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103
    return float(2e8 / loss ** (1 / 0.21))


def _tokens(parameters: float, given: int | None, *, sparse: bool) -> Suggestion:
    optimum = TOKENS_A_PARAMETER * parameters
    longest, whose = max(
        (run.values["tokens"] / run.values["parameters"], f"{run.family} {run.model}")
        for run in published_runs()
        if run.values["parameters"] >= OF_SIZE
    )
    value = float(given) if given is not None else float(f"{optimum:.3g}")
    reason = (
        f"{TOKENS_A_PARAMETER:.0f} for each of {format_count(parameters)} parameters: the least loss for the FLOPs of "
        "training"
    )
    if given is not None:
        reason = (
            f"as given: {format_count(given / parameters)} for each of {format_count(parameters)} parameters, where "
            f"{TOKENS_A_PARAMETER:.0f} give the least loss for the FLOPs of training"
        )
        if given < optimum / 2:
            reason += ": a smaller model would reach a lower loss on so few tokens"
    reason += f"; a model that will serve many is trained longer, up to {longest:,.0f} a parameter ({whose})"
    if sparse:
        reason += "; counted are the parameters that a token uses, a law for experts is not settled"
    bounds = min(value, optimum), max(value, longest * parameters)
    return Suggestion("tokens", value, "tokens", reason, "2203.15556, 2401.00448", bounds)


def _batch(parameters: float, tokens: float, seq_len: int | None) -> tuple[Suggestion, int | None]:
    law = power_law("batch_tokens", ("parameters", "tokens"))
    wanted = law(parameters=parameters, tokens=tokens)
    value = min(wanted, max(1.0, tokens / FEWEST_STEPS))
    rows = None
    if seq_len is not None:
        rows = _round_rows(value / seq_len)
        value = float(rows * seq_len)
    flops, critical = 6.0 * parameters * tokens, critical_batch(parameters, tokens)
    reason = (
        f"{law.n_runs} published runs lie around {_formula(law)}; DeepSeek LLM's law of compute gives "
        f"{format_count(deepseek_batch(flops))}; beyond some {format_count(critical)} (Kaplan's critical batch) more "
        "saves few steps"
    )
    if wanted > tokens / FEWEST_STEPS:
        reason += f"; no more than the tokens allow for {FEWEST_STEPS:,} steps"
    if rows == 1:
        reason += "; one row is the least"
    reason += _extrapolation(law, parameters=parameters, tokens=tokens)
    spread = law.spread[0] * wanted, law.spread[1] * wanted
    source = "modelworks/plan/published_runs.csv; 2401.02954; 2001.08361"
    return Suggestion("batch", value, "tokens", reason, source, spread), rows


def _rate(parameters: float, tokens: float, batch: float, optimizer: str) -> Suggestion:
    if optimizer in ("sgd", "momentum", "lars"):
        return Suggestion("learning_rate", None, "", NEVER_PUBLISHED, "none", None)
    if optimizer == "lamb":
        value = _two_digits(6.25e-4 * scale_factor("sqrt", batch, 512 * 128))
        reason = "the rule of the paper for BERT-large, 6.25e-4 at 512 rows of 128 tokens and the root of the batch "
        reason += "beyond: a guess for another model"
        return Suggestion("learning_rate", value, "", reason, "1904.00962 table 4", (value / 4, value * 4))
    if optimizer in ("adafactor", "adafactor-moment"):
        reason = "relative to each tensor's root mean square, constant for 10,000 steps, then 1 / sqrt(step)"
        return Suggestion("learning_rate", 1e-2, "", reason, "2204.02311 section 5", (1e-3, 1e-2))
    law = power_law("rate", ("parameters",))
    highest = max(run.values["rate"] for run in published_runs())
    wanted = min(law(parameters=parameters), highest)
    reason = (
        f"{law.n_runs} published runs of Adam lie around {_formula(law)}, those since 2023 rather above; "
        f"DeepSeek LLM's law of compute gives {deepseek_rate(6.0 * parameters * tokens):.2g}"
    )
    if wanted == highest:
        reason += "; no run is known above this"
    reason += _extrapolation(law, parameters=parameters)
    spread = law.spread[0] * wanted, law.spread[1] * wanted
    source = "modelworks/plan/published_runs.csv; 2401.02954"
    if optimizer.startswith("lion"):
        reason = (
            f"a fifth of AdamW's, as a sign's update is larger: a third to a tenth is recommended; for AdamW {reason}"
        )
        return Suggestion(
            "learning_rate", _two_digits(wanted / 5), "", reason, f"2302.06675; {source}", (wanted / 10, wanted / 3)
        )
    if optimizer == "muon":
        reason = (
            f"of the matrices, as its author uses; {_two_digits(wanted):g} for the rest, and for the matrices too "
            f"where their update is scaled to the size of AdamW's (2502.16982); for AdamW {reason}"
        )
        return Suggestion(
            "learning_rate", 0.02, "", reason, f"kellerjordan.github.io/posts/muon; {source}", (0.005, 0.05)
        )
    return Suggestion("learning_rate", _two_digits(wanted), "", reason, source, spread)


def _warmup(steps: int, batch: float) -> Suggestion:
    shortest = math.ceil(2 / (1 - BETA2) - 1e-9)
    wanted = min(LONGEST_WARMUP, max(shortest, round(WARMUP_SHARE * steps)))
    value = min(wanted, max(1, steps // 2))
    reason = (
        f"{WARMUP_SHARE:.0%} of {steps:,} steps, at most the {LONGEST_WARMUP:,} of the Llama runs, at least "
        f"2 / (1 - beta2) = {shortest} for beta2 = {BETA2:g}"
    )
    if value < wanted:
        reason += "; but no more than half of the steps"
    tokens = 375e6  # GPT-3's warmup, which is often quoted as so many steps
    bounds = sorted((float(shortest), max(float(value), tokens / batch)))
    source = "2302.13971 section 2.3; 1910.04209; 2005.14165 appendix B"
    return Suggestion("warmup", float(value), "steps", reason, source, (bounds[0], bounds[1]))


def _decay(optimizer: str) -> Suggestion:
    if optimizer.startswith("lion"):
        reason = "five times AdamW's 0.1, so that rate x decay stays what it is"
        return Suggestion("weight_decay", 0.5, "", reason, "2302.06675", (0.3, 1.0))
    if optimizer in ("sgd", "momentum", "lars", "adam", "adam8bit", "adafactor", "adafactor-moment"):
        reason = "decay that goes through the gradient is not what published runs of decoders used"
        return Suggestion("weight_decay", None, "", reason, "1711.05101", None)
    if optimizer == "lamb":
        return Suggestion("weight_decay", 0.01, "", "of BERT, as published", "1904.00962", (0.01, 0.1))
    reason = "decoupled, on matrices: GPT-3, Llama and most since"
    return Suggestion("weight_decay", 0.1, "", reason, "2005.14165, 2302.13971", (0.01, 0.1))


def _formula(law: PowerLaw) -> str:
    """`0.05 x parameters^0.24 x tokens^0.33`."""
    powers = " x ".join(f"{name}^{power:.2f}" for name, power in law.exponents.items())
    return f"{math.exp(law.constant):.3g} x {powers}"


def _extrapolation(law: PowerLaw, **variables: float) -> str:
    outside = law.outside(**variables)
    if not outside:
        return ""
    bounds = " and ".join(f"{name} of {' to '.join(map(format_count, law.bounds[name]))}" for name in outside)
    return f"; extrapolated: the runs have {bounds}"


def _round_rows(rows: float) -> int:
    """To a power of two, or one and a half of one: batches that divide."""
    if rows < 2:
        return 1 if rows < 1.5 else 2
    power = int(2 ** math.floor(math.log2(rows)))
    return min((power, power * 3 // 2, power * 2), key=lambda whole: abs(math.log(whole / rows)))


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")
